/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Timestamps (RFC 7323). Each host and each of our sockets has its own clock. The TSvals that a host receives must never go back,
 * whether they come from the socket or from the other host.
 */
#ifndef LONGSPLICE_CLOCK_H
#define LONGSPLICE_CLOCK_H

#include "segment.h"

#define NS_PER_MS 1000000ull

/* Is the TSval new: not older than the latest one? If the host's clock went half round while it was not heard, there is no
 * telling, and the next one counts as new (LEG_UNHEARD). A clock that is not known to be a fast one may have gone half round, too
 * (36 minutes at 1 MHz): its TSval seems to have gone back. A segment with new data or a new acknowledgement cannot be late by
 * more than 2^24, so a larger step back counts as new, too. */
INLINE int is_news(const struct leg *l, const struct seg *s)
{
	if (l->flags & LEG_UNHEARD || !before(s->tsval, l->tsval_in))
		return 1;
	return l->tsval_in - s->tsval > 1 << 24 && (after(s->ack, l->ack_in) || after(s->seq + s->len, l->max_in));
}

/* Is the segment a duplicate from the host's last connection from this port? Its numbers may be in the window, if that connection
 * was faster than the clock of initial numbers (RFC 9293, 3.4.1), but its TSval is older than the SYN's. The receiver discards it
 * (PAWS; RFC 7323, 5.3). A larger step back is that of a clock which may have gone half round, as in is_news(). */
INLINE int is_from_earlier(const struct leg *l, const struct seg *s)
{
	return s->has_ts && !s->again && (l->flags & (LEG_TS | LEG_UNHEARD)) == LEG_TS && l->floor_in - s->tsval - 1 < 1 << 24;
}

/* Let floor_in follow an acceptable TSval, an eighth of a round behind, so that both can be compared. No receiver is stricter:
 * each has got a segment in order with that TSval, or a later one. Before LEG_UNHEARD is cleared. */
INLINE void follow_floor(struct leg *l, __u32 tsval)
{
	if (l->flags & LEG_UNHEARD || tsval - l->floor_in - (1u << 30) < 1u << 30)
		l->floor_in = tsval - (1u << 29);
}

/* How long the host was silent, ns. `seen` may be slightly later than `now`, if another processor has set it. */
INLINE __u64 silent_for(const struct leg *l, __u64 now)
{
	return now > l->seen ? now - l->seen : 0;
}

/* Longest delay of a segment, beyond that of the fastest, for which the offset of the host's clock is kept, ms. A path may
 * queue segments for seconds. Clocks that tick less often than every millisecond seem to fall behind by no more than this. */
#define LONGEST_QUEUE 8192

/* Update the offset of the host's clock. The segment that was delayed least tells it best, and yields the highest value. A clock
 * that ticks less often is followed at that distance: the segment that shows how far it has fallen behind may be one from a
 * queue. */
INLINE void compare_clocks(struct leg *l, __u32 tsval, __u64 now)
{
	__u32 offset = tsval - (__u32)(now / NS_PER_MS), behind = l->clock_in - offset;

	if (behind > 2 * LONGEST_QUEUE) /* higher, or far off: the clock has jumped, or there is no offset yet */
		l->clock_in = offset;
	else if (behind > LONGEST_QUEUE)
		l->clock_in = offset + LONGEST_QUEUE;
}

/* Has the host not been heard for half a round of its clock? In forwarding mode, it is not. At 1 kHz, half round is 24.8 days. */
INLINE int is_unheard(const struct leg *l, __u64 now)
{
	return silent_for(l, now) >= ((__u64)1 << 31) * NS_PER_MS / (l->flags & LEG_FAST_CLOCK ? 1000 : 1);
}

/* Note that TSvals cannot be compared with earlier ones, if that is so. Before anything is decided by them. */
INLINE void note_unheard(struct leg *l, const struct seg *s, __u64 now)
{
	if (s->has_ts && is_unheard(l, now))
		__sync_fetch_and_or(&l->flags, LEG_UNHEARD);
}

/* Record the time of the host's latest TSval, and whether its clock is a fast one. Most clocks tick every millisecond, and
 * those of Linux's tcp_usec_ts a thousand times as often. A clock mistaken for a fast one only has to be heard more often
 * (lost_clock()). */
INLINE void heard(struct leg *l, const struct seg *s, __u64 now)
{
	__u32 ms = silent_for(l, now) / NS_PER_MS;

	if (s->has_ts && !is_news(l, s)) /* another segment with a later TSval has overtaken this one */
		return;
	if (s->has_ts && !(l->flags & LEG_FAST_CLOCK) && s->tsval - l->tsval_in > (ms + 64) * 4) /* 64: for varying delays */
		__sync_fetch_and_or(&l->flags, LEG_FAST_CLOCK);
	if (s->has_ts)
		compare_clocks(l, s->tsval, now);
	l->seen = now;
}

/* May the host's clock have gone half round since it was heard? Then its TSvals cannot be made to continue those that our
 * socket sent to the other host meanwhile, and that host might take them for old for as long again (PAWS). So might it if the
 * clock is a fast one, and its TSvals since the unsplice are not known. */
INLINE int lost_clock(const struct leg *l, const struct leg *o, __u64 now)
{
	const __u32 untimed = LEG_FAST_CLOCK | LEG_UNTIMED;

	return l->flags & o->flags & LEG_TS && (is_unheard(l, now) || (l->flags & untimed) == untimed);
}

/* Do both the local socket and the data path send to the host, or may they? */
INLINE int both_speak(const struct leg *l)
{
	return l->phase_in != l->phase_out || (l->phase_in != PHASE_LOCAL && l->phase_in != PHASE_FWD);
}

/* Return the TSval to send for `tsval` of the sender, which is either the socket or the other host. add: the offset from its
 * clock to ours, raised if its `newest` TSval would make ours go back. While both send, perhaps on two processors, the first
 * segment under the lock may be the last one to leave, and must not look old. So our clock stands still then, and the offset
 * shrinks, so that an echo stands for the sender's newest TSval. (An older echo would tell the sender that its retransmission
 * was not needed: RFC 3522.) A socket that was silent meanwhile continues from there (LEG_CLOCK). */
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

/* The same for a leg with LEG_END_TO_END. Its socket sends in the name of the other host and has that host's clock, but a
 * second late (BEHIND in handshake.rs). So it repeats the latest TSval, rather than get ahead of the host's own segments. An
 * echo of a TSval that is repeated stands for the socket's newest one: or the socket would take the length of a drain for a
 * round-trip time. */
INLINE __u32 shared_tsval(struct leg *l, __u32 tsval)
{
	if (both_speak(l))
		l->shim_ts = l->tsval_out - tsval;
	else
		l->tsval_out = later(l->tsval_out, tsval + l->shim_ts);
	return l->tsval_out;
}

/* Set the offset for the TSvals of the other host a last time, at the commit: they must not be older than what the local
 * socket has sent. With LEG_END_TO_END, it is the other host's clock, unless later TSvals were sent. Under to's lock. */
INLINE void settle_tsval(struct leg *to, __u32 tsval)
{
	to->ts_from_peer = later(to->ts_from_peer, to->tsval_out - tsval);
	if (to->flags & LEG_END_TO_END)
		to->ts_from_peer = later(to->ts_from_peer, 0);
}

/* Plan timestamps for a question that we ask a host: without, it may drop the question (RFC 7323, 3.2). */
INLINE void stamp(struct edit *e, __u32 tsval, __u32 tsecr)
{
	e->tsval = tsval;
	e->tsecr = tsecr;
	e->strip_ts = 0;
	e->stamp = 1;
}

/* Estimate the latest TSval that l's host was sent in forwarding mode, since path entries have no room for it. It must not be
 * too low: the host would drop all that the socket sends until its answer corrects the estimate (PAWS, learn_from_host()). The
 * latest segment of the other host, o's, may have waited in a queue that has drained since, so that the TSvals behind it grew
 * faster than time: its clock is estimated as of the segment delayed least (compare_clocks()). It ticks every millisecond on
 * most hosts (RFC 7323, 5.4, allows 1 ms to 1 s), give or take 1/2048 while it was not compared. 8 more are for rounding and a
 * shorter delay than ever seen. With a faster clock (1 MHz in Linux with tcp_usec_ts) the estimate is too low, until
 * the other host's next segment tells (reached_at_least()). Hosts compare modulo 2^32, so this works after any length of time. */
INLINE __u32 tsval_reached(const struct leg *l, const struct leg *o, __u64 now)
{
	__u32 silent = silent_for(o, now) / NS_PER_MS;

	return o->clock_in + (__u32)(now / NS_PER_MS) + (silent >> 11) + 8 + l->ts_from_peer;
}

/* Correct that estimate by the first TSval of the other host after the unsplice: l's host was sent none beyond it. */
INLINE void reached_at_least(struct leg *l, __u32 tsval)
{
	l->tsval_out = later(l->tsval_out, tsval + l->ts_from_peer);
}

#endif
