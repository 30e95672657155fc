/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Forwarding mode: what becomes of a segment that finds a path entry in force. Its numbers have to prove themselves
 * (path_refuses); it may be the proxy's, or the last before that (path_is_beyond); then it moves both entries, and an edit says
 * how it goes on (path_step). The general way takes these steps one after the other; between them it looks at the packet:
 * checksum, time to live, size. The short way knows the first proof only, and moves and edits alike (fast.h). No look-ups, no
 * packets, no locks: a segment comes in on any processor, and the words of an entry change by compare-and-swap. */
#ifndef LONGSPLICE_STEP_H
#define LONGSPLICE_STEP_H

#include "ecn.h"
#include "segment.h"

/* The window of an acknowledgement as five bits of path.via: steps of half an octave, rounded up. room: as in the header. */
INLINE __u32 room_code(__u32 room)
{
	__u32 n = 0, top = room - 1; /* n: number of the highest bit of `top` */

	if (!room)
		return 0;
	if (top < 8)
		return 1;
	if (top >> 8)
		top >>= 8, n = 8;
	if (top >> 4)
		top >>= 4, n += 4;
	if (top >> 2)
		top >>= 2, n += 2;
	n += top >> 1;
	return 2 * (n - 3) + 2 + ((room - 1) >> (n - 1) & 1);
}

/* The largest window of that code. */
INLINE __u32 room_of(__u32 code)
{
	__u32 octave = (code - 1) >> 1;

	return code ? (8u << octave) + (code & 1 ? 0 : 4u << octave) : 0;
}

/* ---- what a segment has to prove ----
 *
 * Only what its receiver would accept moves any state, and only as far as is proven. There are two proofs. A segment that begins
 * exactly where the last one ended comes from who has seen that one: nobody guesses 32 bits. That is all that the short way
 * takes. Any other has to lie between what the receiver has acknowledged and the right edge that it has announced, and to
 * acknowledge what was sent to its host: numbers that only the other direction moves (`rev`, the entry of what the receiver
 * sends), so that they cannot be walked from here. That is what the receiver itself asks (RFC 9293, 3.10.7.4; RFC 5961, 5). */

INLINE __u32 path_via(const struct path *p)
{
	return p->via & ~VIA_ROOM; /* with VIA_TAP, for which there is no next hop */
}

INLINE __u32 path_index(const struct path *p)
{
	return p->via & VIA_INDEX;
}

/* path.max_ack and what stands beside it, as one word. */
union path_acked {
	__u64 all;
	struct {
		__u32 max_ack;
		__u16 via;
		__u8 scales, seen;
	};
};

INLINE union path_acked path_acked(const struct path *p)
{
	return (union path_acked){ .all = *(const volatile __u64 *)&p->max_ack };
}

/* What the receiver of p's segments expects next, as it has said. */
INLINE __u32 path_expected(const struct path *rev)
{
	return *(const volatile __u32 *)&rev->max_ack + rev->ack_add;
}

/* The largest window that the host whose packets find `p` may have announced: no segment for it is older, none of its own
 * acknowledges less. */
INLINE __u32 path_reach(const struct path *p)
{
	return (__u32)65535 << (p->scales & 15);
}

INLINE int path_in_window(union path_word w, const struct path *rev, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);
	union path_acked a = path_acked(rev);
	__u32 expected = a.max_ack + rev->ack_add, room = room_of((a.via & VIA_ROOM) >> VIA_ROOM_SHIFT);

	if (s->seq == w.end)
		return 1;
	return (__s32)(s->seq - expected) <= (__s32)(room << (a.scales & 15)) &&
	       (__s32)(expected - end) <= (__s32)path_reach(rev) + 1; /* one below: a keep-alive (RFC 9293, 3.8.4) */
}

/* The number that a reset goes on with, in the sender's space. The receiver ignores a reset beyond its window, and it may
 * have lost the bytes before. Its window is at least `room`. A reset in order goes to where the receiver is, any other to the
 * last number before the edge, for the receiver to ask: the edge itself is in order for one that has received all up to there. */
INLINE __u32 path_reset_at(const struct path *rev, __u32 seq, int in_order)
{
	union path_acked a = path_acked(rev);
	__u32 code = (a.via & VIA_ROOM) >> VIA_ROOM_SHIFT, expected = a.max_ack + rev->ack_add;
	__u32 room = code ? room_of(code - 1) << (a.scales & 15) : 0;

	if ((__s32)(seq - expected) <= (__s32)room)
		return seq;
	return in_order ? expected : room > 1 ? expected + room - 1 : seq;
}

/* A keep-alive (RFC 9293, 3.8.4) for the host that gets what `p` forwards: it says where it is, and that goes back. */
INLINE void path_ask(const struct path *p, const struct path *rev, struct edit *e)
{
	e->seq = path_expected(rev) - 1 + p->seq_add;
	e->ack = p->max_ack + p->ack_add;
	e->win = e->urg = 0;
	e->strip_ts = e->strip_sack = e->strip_ecn = 1;
	e->flags = TH_ACK;
	e->keep = 0;
}

/* The first proof: the next segment in order. The short way knows no other. */
INLINE int path_is_next(const struct path *p, union path_word w, const struct seg *s)
{
	__s32 ahead = s->ack - p->max_ack, reach = path_reach(p);

	return s->seq == w.end && !(s->len && w.flags & PATH_FIN) && ahead <= reach && -ahead <= reach;
}

INLINE int path_takes_ack(const struct path *p, const struct path *rev, const struct seg *s)
{
	union path_word sent = { .all = *(volatile __u64 *)&rev->word.all };
	__u32 most = sent.end + rev->seq_add;

	if (!(sent.flags & PATH_SPLICED)) /* `rev` comes into force in a moment, or is being stopped: its end may be old */
		most = p->max_ack + path_reach(p);
	return !after(s->ack, most) && (__s32)(p->max_ack - s->ack) <= (__s32)path_reach(p);
}

/* The verdict on a segment that is not acceptable, or 0. Not for SYN, RST. */
INLINE __u32 path_refuses(const struct path *p, union path_word w, const struct path *rev, const struct seg *s)
{
	if (!(s->flags & TH_ACK))
		return V_NO_ACK;
	if (path_is_next(p, w, s))
		return 0;
	if (!path_in_window(w, rev, s))
		return V_OUT_OF_WINDOW;
	return path_takes_ack(p, rev, s) ? 0 : V_BAD_ACK;
}

/* Is a FIN that ends at `end` one? It has the last number of all, which the receiver has not acknowledged as something else. */
INLINE int path_takes_fin(union path_word w, const struct path *rev, __u32 end)
{
	return !before(end, w.end) && (w.flags & PATH_FIN || after(end, path_expected(rev)));
}

/* The word after an acknowledgement, of a window as in the header. now: as path.seen. Windows belong to the highest
 * acknowledgement; of several with the same, the widest counts. */
INLINE union path_acked acked_moved(union path_acked a, __u32 ack, __u32 win, __u8 now)
{
	__u32 room = room_code(win) << VIA_ROOM_SHIFT;

	if (after(ack, a.max_ack) || (ack == a.max_ack && room > (a.via & VIA_ROOM))) {
		a.max_ack = ack;
		a.via = (a.via & ~VIA_ROOM) | room;
	}
	a.seen = now;
	return a;
}

/* Is the limit so far from `end` that nobody has to look it up? */
INLINE int path_is_far(union path_word w, __u32 end)
{
	return !(w.flags & PATH_TRIGGER) || (__s16)((end >> 16) - w.wraps) < 0;
}

/* The word after a segment that ends at `end`; PATH_FIN in `flags`: with a FIN. A FIN's number is the end: one below it is none,
 * and what goes beyond it shows that it was none. */
INLINE union path_word word_moved(union path_word w, __u32 end, __u16 flags)
{
	union path_word n = w;

	n.flags |= flags & ~PATH_FIN;
	if (after(end, w.end)) {
		n.end = end;
		n.flags &= ~(PATH_FIN | PATH_FIN_ACKED);
		if (end < w.end && !(w.flags & PATH_TRIGGER))
			n.wraps++;
	}
	if (end == n.end)
		n.flags |= flags & PATH_FIN;
	return n;
}

/* Is this the proxy's own, or the last of what is not? Then the direction goes back, and the leg's record decides: `l`, of which
 * nothing may be left. Not for SYN, RST. */
INLINE int path_is_beyond(union path_word w, const struct leg *l, const struct seg *s)
{
	__u32 fin = !!(s->flags & TH_FIN), end = s->seq + s->len + fin;

	if ((w.flags & (PATH_TRIGGER | PATH_FRAGMENTS)) != PATH_TRIGGER || !after(end, w.end))
		return 0;
	return !l || fin || !before(end, l->limit_in);
}

/* ---- what it moves ---- */

/* path.seen of a time in ns, CLOCK_MONOTONIC. */
INLINE __u8 seen_at(__u64 now)
{
	return now >> 33;
}

/* Stops a direction where it is. */
INLINE void stop_path(struct path *p)
{
	__sync_fetch_and_and(&p->word.all, ~((__u64)PATH_SPLICED << 48));
}

/* Advances the word to `end`. 0: done; 1: no longer SPLICED, or, with `far`, near the limit; -1: gave up. */
INLINE int advance_path(struct path *p, __u32 end, __u16 flags, int far)
{
	union path_word w, n;
	int i;

	UNROLL
	for (i = 0; i < 8; i++) {
		w.all = *(volatile __u64 *)&p->word.all;
		if (!(w.flags & PATH_SPLICED))
			return 1;
		if (far && !path_is_far(w, end))
			return 1;
		n = word_moved(w, end, flags);
		if (n.all == w.all)
			return 0;
		if (__sync_val_compare_and_swap(&p->word.all, w.all, n.all) == w.all)
			return 0;
	}
	return -1;
}

/* Has an entry been stopped? Whoever has done that may not have seen what was noted there since. After an atomic operation. */
INLINE int is_stopped(const struct path *p)
{
	return !(*(volatile __u16 *)&p->word.flags & PATH_SPLICED);
}

/* Raises the highest acknowledgement, and notes its window and the time (now: as path.seen). Written only when something changes:
 * a line that is only read may stay in the caches of several processors. 0: done; 1: the entry is stopped; -1: gave up. */
INLINE int advance_ack(struct path *p, __u32 ack, __u32 win, __u8 now)
{
	__u64 *at = (__u64 *)&p->max_ack;
	union path_acked a, n;
	int i;

	UNROLL
	for (i = 0; i < 8; i++) {
		a.all = *(volatile __u64 *)at;
		n = acked_moved(a, ack, win, now);
		if (n.all == a.all)
			return 0;
		if (__sync_val_compare_and_swap(at, a.all, n.all) == a.all)
			return n.max_ack == a.max_ack ? 0 : is_stopped(p);
	}
	return -1;
}

/* All up to `end` was sent on. 0: done; 1: no longer SPLICED; -1: gave up. */
INLINE int sent_to(struct path *p, struct path *rev, union path_word w, __u32 end, __u32 fin)
{
	int r;

	fin = fin && path_takes_fin(w, rev, end);
	r = advance_path(p, end, fin ? PATH_FIN : 0, 0);
	if (r || !fin || (w.flags & PATH_FIN_ACKED && end == w.end))
		return r;
	__sync_fetch_and_or(&rev->word.all, (__u64)PATH_PEER_FIN << 48);
	return 0;
}

/* The acknowledgement of a FIN that went the other way. Is the flow over? */
INLINE int fin_acked(struct path *p, struct path *rev, __u32 ack)
{
	union path_word w = { .all = *(volatile __u64 *)&rev->word.all };

	if (w.flags & PATH_FIN && ack != w.end + rev->seq_add)
		return 0;
	__sync_fetch_and_and(&p->word.all, ~((__u64)PATH_PEER_FIN << 48));
	if (!(w.flags & PATH_FIN))
		return 0; /* what seemed to be one was none */
	__sync_fetch_and_or(&rev->word.all, (__u64)PATH_FIN_ACKED << 48);
	return !!(p->word.flags & PATH_FIN_ACKED);
}

/* ---- the step ---- */

enum step {
	STEP_ON,     /* it goes on as plan.f says */
	STEP_ASK,    /* its sender is asked about it: path_ask() */
	STEP_DROP,   /* plan.dropped says why */
	STEP_RECORD, /* the entry was stopped: the leg's record decides */
};

INLINE void path_edit(const struct path *p, union path_word w, const struct seg *s, struct edit *e)
{
	__u32 win = (__u32)s->win << (p->scales & 15);

	e->seq = s->seq + p->seq_add;
	e->ack = s->ack + p->ack_add;
	e->tsval = s->tsval + p->tsval_add;
	e->tsecr = s->tsecr + p->tsecr_add;
	e->sack_add = p->ack_add;
	e->sack_lo = s->ack - FAR;
	e->sack_hi = s->ack + FAR;
	e->win = window_field(win, p->scales >> 4);
	e->urg = s->urg;
	e->flags = s->flags;
	if (w.flags & PATH_TRIGGER && after(urgent_end(s), s->seq + s->len)) /* it may be the proxy's */
		e->flags &= ~TH_URG;
	e->keep = s->len;
	e->strip_ts = !!(w.flags & PATH_STRIP_TS);
	e->strip_sack = !!(w.flags & PATH_STRIP_SACK);
	e->strip_ecn = !(w.flags & PATH_ECN);
}

/* A reset. One that is not in order may be so all the same: what its sender had sent last may not have come here. The receiver
 * asks it (RFC 5961, 3.2), and its answer is in order. Before the splice the sender may have been promised more than the receiver
 * has room for. */
INLINE enum step path_reset(struct path *p, struct path *rev, union path_word w, struct leg *l, const struct seg *s,
			    struct plan *plan)
{
	/* the next in order as the receiver or as the sender has it */
	int in_order = s->seq == path_expected(rev) || s->seq == w.end;

	if (in_order) {
		__sync_fetch_and_or(&p->word.all, (__u64)(PATH_DEAD | PATH_RST) << 48);
		__sync_fetch_and_or(&rev->word.all, (__u64)PATH_DEAD << 48);
		plan->events = 1 << EVENT_RESET;
	} else {
		if (!path_in_window(w, rev, s) && (!l || before(s->seq, w.end) || after(s->seq, l->edge_out))) {
			plan->dropped = V_BAD_RST;
			return STEP_DROP;
		}
		if (l)
			__sync_fetch_and_or(&l->flags, LEG_PROBE);
		if (before(s->seq, path_expected(rev)))
			return STEP_ASK;
	}
	path_edit(p, w, s, &plan->f);
	plan->f.seq = path_reset_at(rev, s->seq, in_order) + p->seq_add;
	return STEP_ON;
}

/* `w`: the word that the proofs were about. l: the leg's record, if there is one; of a reset only. whole: of a first fragment the
 * end is not known, and it counts for nothing but its acknowledgement. now: as path.seen. Not for SYN. */
INLINE enum step path_step(struct path *p, struct path *rev, union path_word w, struct leg *l, const struct seg *s, int whole,
			   __u8 now, struct plan *plan)
{
	__u32 fin = !!(s->flags & TH_FIN), end = s->seq + s->len + fin;
	int r = 0;

	plan->events = 0;
	if (s->flags & TH_RST)
		return path_reset(p, rev, w, l, s, plan);
	plan->dropped = V_STALE_CPU;
	if (whole && ((s->len && after(end, w.end)) || fin))
		r = sent_to(p, rev, w, end, fin);
	if (r)
		return r > 0 ? STEP_RECORD : STEP_DROP;
	if (advance_ack(p, s->ack, s->win, now) < 0)
		return STEP_DROP;
	if (w.flags & PATH_PEER_FIN && fin_acked(p, rev, s->ack))
		plan->events = 1 << EVENT_CLOSED;
	if (is_stopped(p))
		return STEP_RECORD;
	plan->dropped = V_CE_DROPPED;
	if (path_loses(w, s->ecn, s->seq, s->len))
		return STEP_DROP;
	path_edit(p, w, s, &plan->f);
	return STEP_ON;
}

#endif
