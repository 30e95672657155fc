/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Timestamps (RFC 7323). Each host, and each of our sockets, has a clock of its own. What a host is told must never go back,
 * whoever speaks to it.
 */
#ifndef LONGSPLICE_CLOCK_H
#define LONGSPLICE_CLOCK_H

#include "segment.h"

#define NS_PER_MS 1000000ull

/* Is the TSval no older than what was seen? A clock may have gone half round while its host was silent, 36 minutes at 1 MHz: then
 * it seems to have gone back, and by more than a segment can be late that brings something new. */
INLINE int is_news(const struct leg *l, const struct seg *s)
{
	if (!before(s->tsval, l->tsval_in))
		return 1;
	return l->tsval_in - s->tsval > 1 << 24 && (after(s->ack, l->ack_in) || after(s->seq + s->len, l->max_in));
}

/* ns, from a time that may be later by a moment, on another processor. */
INLINE __u64 silent_for(const struct leg *l, __u64 now)
{
	return now > l->seen ? now - l->seen : 0;
}

/* Notes when the host's last TSval was so, and whether its clock is a fast one: most tick every millisecond, Linux's tcp_usec_ts
 * a thousand times as often. One that is taken for fast and is not only has to be heard more often (lost_clock). */
INLINE void heard(struct leg *l, const struct seg *s, __u64 now)
{
	__u32 ms = silent_for(l, now) / NS_PER_MS;

	if (s->has_ts && !is_news(l, s)) /* what overtook it has told a later time */
		return;
	if (s->has_ts && !(l->flags & LEG_FAST_CLOCK) && s->tsval - l->tsval_in > (ms + 64) * 4) /* 64: delays vary */
		__sync_fetch_and_or(&l->flags, LEG_FAST_CLOCK);
	l->seen = now;
}

/* May the host's clock have gone half round since it was heard? Then nothing says how to continue with it what the other host was
 * told by our socket meanwhile: it could seem old to that host for as long again (PAWS). A clock of 1 kHz takes 24.8 days. */
INLINE int lost_clock(const struct leg *l, const struct leg *o, __u64 now)
{
	__u64 half_round = ((__u64)1 << 31) * NS_PER_MS / (l->flags & LEG_FAST_CLOCK ? 1000 : 1);

	return l->flags & o->flags & LEG_TS && silent_for(l, now) >= half_round;
}

/* Do the local socket and the data path both speak to the host? */
INLINE int both_speak(const struct leg *l)
{
	return l->phase_in != l->phase_out || (l->phase_in != PHASE_LOCAL && l->phase_in != PHASE_FWD);
}

/* The TSval to be sent for `tsval`. `add`, from the sender's clock to ours, is raised when its `newest` would make ours go
 * back. While two speak, on two processors perhaps, what was settled first under the lock may leave last, and must not look
 * old: ours stands still then, and `add` sinks, so that an echo of it is the sender's newest. (An older one would tell the
 * sender that what it has sent again was not needed: RFC 3522.) A socket that was silent meanwhile goes on from there. */
INLINE __u32 our_tsval(struct leg *l, __u32 tsval, int newest, __u32 *add)
{
	int still = both_speak(l);

	if (newest && (still || before(tsval + *add, l->tsval_out)))
		*add = l->tsval_out - tsval;
	if (still) {
		l->flags |= LEG_CLOCK;
		return l->tsval_out;
	}
	l->tsval_out = later(l->tsval_out, tsval + *add);
	return tsval + *add;
}

/* The same for the socket of a foreign leg. It speaks for the other host and has that host's clock, but a second late (BEHIND in
 * foreign.rs): it repeats what was said last, rather than to be ahead of the host when that speaks for itself again. */
INLINE __u32 foreign_tsval(struct leg *l, __u32 tsval)
{
	if (!both_speak(l))
		l->tsval_out = later(l->tsval_out, tsval + l->shim_ts);
	return l->tsval_out;
}

/* The local socket may have spoken last: what the other host sends from now on must not seem older. A foreign leg has its very
 * clock, if it did not speak of later times. Under to's lock. */
INLINE void settle_tsval(struct leg *to, __u32 tsval)
{
	to->ts_from_peer = later(to->ts_from_peer, to->tsval_out - tsval);
	if (to->flags & LEG_FOREIGN)
		to->ts_from_peer = later(to->ts_from_peer, 0);
}

/* Path entries have no room for the last TSval. It is estimated, not too low: the other host's clock has gone on since it
 * was seen, by 1 ms ticks as most hosts have it (RFC 7323, 5.4, allows 1 ms to 1 s), and some more for the time on the way
 * and our coarse clock. If it was faster, 1 MHz in Linux with tcp_usec_ts, the host drops one segment (PAWS) and its answer tells
 * its last TSval (learn_from_host). A host compares modulo 2^32, so that holds however long it was. */
INLINE __u32 tsval_reached(const struct leg *l, const struct leg *o, __u64 now)
{
	return o->tsval_in + (__u32)(silent_for(o, now) / NS_PER_MS) + 8 + l->ts_from_peer;
}

#endif
