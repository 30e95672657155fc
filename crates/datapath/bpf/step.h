/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Forwarding mode: what happens to a segment whose path entry is in force. The general way takes three steps, and checks the
 * packet (checksum, TTL, size) between them: path_refuses() decides whether the segment is acceptable; path_is_beyond()
 * whether it takes the flow back to control mode; path_step() updates both entries and plans the rewrite. The short way
 * (fast.h) accepts segments by the first proof only, with the same updates and rewrite. Nothing here looks up maps, handles
 * packets or takes locks: segments arrive on any processor, and the words of an entry change by compare-and-swap. */
#ifndef LONGSPLICE_STEP_H
#define LONGSPLICE_STEP_H

#include "clock.h"
#include "ecn.h"
#include "segment.h"

/* Encode the window of an acknowledgement in five bits of path.via: in steps of half an octave, rounded up. room: as in the
 * header, unscaled. */
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

/* The largest window with this code, unscaled. */
INLINE __u32 room_of(__u32 code)
{
	__u32 octave = (code - 1) >> 1;

	return code ? (8u << octave) + (code & 1 ? 0 : 4u << octave) : 0;
}

/* ---- which segments are acceptable ----
 *
 * A segment changes state only if its receiver would accept it, and only as far as that is proven. There are two proofs. First,
 * a segment that begins exactly where the last one ended comes from someone who has seen that one, since 32 bits cannot be
 * guessed. The short way accepts no others. Second, the segment lies between the receiver's acknowledgement and its announced
 * right edge, and acknowledges bytes that were sent to the segment's host. Only the other direction changes these limits (`rev`,
 * the entry for the receiver's own segments), so forged segments in this direction cannot move them step by step. The receiver
 * itself applies the same rules (RFC 9293, 3.10.7.4; RFC 5961, 5). */

/* The index of the next hop for the short way, which finds none if forwarded data is copied. */
INLINE __u32 path_via(const struct path *p)
{
	return p->via & ~VIA_ROOM; /* VIA_TAP stays in: no next hop has that index */
}

/* The index of the next hop. */
INLINE __u32 path_index(const struct path *p)
{
	return p->via & VIA_INDEX;
}

/* path.max_ack and the fields beside it, as one word. */
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

/* The receiver's highest acknowledgement, in the sender's numbers: the number that it expects next. rev: the entry for the
 * receiver's segments. */
INLINE __u32 path_expected(const struct path *rev)
{
	return *(const volatile __u32 *)&rev->max_ack + rev->ack_add;
}

/* The largest window that the host that sends p's packets may have announced, bytes. Acceptable segments to this host are not
 * older than that, and its own acknowledgements not lower. */
INLINE __u32 path_reach(const struct path *p)
{
	return (__u32)65535 << (p->scales & 15);
}

/* The second proof, sequence number: is the segment in the receiver's window, or up to a window below? */
INLINE int path_in_window(union path_word w, const struct path *rev, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);
	union path_acked a = path_acked(rev);
	__u32 expected = a.max_ack + rev->ack_add, room = room_of((a.via & VIA_ROOM) >> VIA_ROOM_SHIFT);

	if (s->seq == w.end)
		return 1;
	return (__s32)(s->seq - expected) <= (__s32)(room << (a.scales & 15)) &&
	       (__s32)(expected - end) <= (__s32)path_reach(rev) + 1; /* + 1: a keep-alive (RFC 9293, 3.8.4) */
}

/* Find the sequence number for a forwarded RST, in the sender's numbers. The receiver may lack the bytes before the RST, and
 * would ignore it beyond its window, which is larger than `room`. So an RST in order gets the number that the receiver expects.
 * Any other gets the last number before the edge, which the receiver challenges. The edge itself would be in order for a receiver
 * that has received everything up to there. Returns 0 if the receiver would ignore the RST, since it is beyond it or may have no
 * window, and has to be asked instead (path_ask()). */
INLINE int path_reset_at(const struct path *rev, __u32 seq, int in_order, __u32 *at)
{
	union path_acked a = path_acked(rev);
	__u32 code = (a.via & VIA_ROOM) >> VIA_ROOM_SHIFT, expected = a.max_ack + rev->ack_add;
	__s32 room = code ? room_of(code - 1) << (a.scales & 15) : 0, ahead = seq - expected;

	if (!in_order && (ahead < 0 || (ahead > room && room <= 1)))
		return 0;
	*at = ahead <= room ? seq : in_order ? expected : expected + room - 1;
	return 1;
}

/* Plan a keep-alive (RFC 9293, 3.8.4) for the receiver of p's segments. Its answer carries its current numbers to the sender.
 * l, o: the records of sender and receiver. A released flow has none, so nothing tells its timestamps. An estimate that is too
 * high does no harm: the keep-alive is not acceptable, so it does not become TS.Recent (RFC 7323, 5.3). now: ns,
 * CLOCK_MONOTONIC. */
INLINE void path_ask(const struct path *p, const struct path *rev, const struct leg *l, const struct leg *o, __u64 now,
		     struct edit *e)
{
	e->seq = path_expected(rev) - 1 + p->seq_add;
	e->ack = p->max_ack + p->ack_add;
	e->win = e->urg = 0;
	e->strip_ts = e->strip_sack = e->strip_ecn = 1;
	e->stamp = 0;
	e->flags = TH_ACK;
	e->keep = 0;
	if (l && o && l->flags & o->flags & LEG_TS)
		stamp(e, tsval_reached(o, l, now), o->tsval_in);
}

/* The first proof: is it the next segment in order? The short way accepts no others. */
INLINE int path_is_next(const struct path *p, union path_word w, const struct seg *s)
{
	__s32 ahead = s->ack - p->max_ack, reach = path_reach(p);

	return s->seq == w.end && !(s->len && w.flags & PATH_FIN) && ahead <= reach && -ahead <= reach;
}

/* The second proof, acknowledgement: of bytes that were sent, and not older than a window. */
INLINE int path_takes_ack(const struct path *p, const struct path *rev, const struct seg *s)
{
	union path_word sent = { .all = *(volatile __u64 *)&rev->word.all };
	__u32 most = sent.end + rev->seq_add;

	if (!(sent.flags & PATH_SPLICED)) /* `rev` is not in force yet, or is being stopped: its end may be out of date */
		most = p->max_ack + path_reach(p);
	return !after(s->ack, most) && (__s32)(p->max_ack - s->ack) <= (__s32)path_reach(p);
}

/* Return 0 if the segment is acceptable, or else a verdict. Not for SYN or RST. */
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

/* Does the segment bring data beyond a gap? Such a one may be a duplicate from earlier. */
INLINE int path_leaves_gap(union path_word w, const struct seg *s)
{
	return after(s->seq + s->len + !!(s->flags & TH_FIN), w.end) && s->seq != w.end && !(s->flags & (TH_SYN | TH_RST));
}

/* Is it one (is_from_earlier())? Path entries have no room for TSvals, so this is decided by those before the commit: the ones of
 * the host's last connection from this port are older. l: the leg's record, or NULL. now: ns, CLOCK_MONOTONIC. */
INLINE int path_is_from_earlier(const struct leg *l, const struct seg *s, __u64 now)
{
	return l && !is_unheard(l, now) && is_from_earlier(l, s);
}

/* Is a FIN that ends at `end` genuine? It must have the highest number of all, and one that the receiver has not acknowledged as
 * data. */
INLINE int path_takes_fin(union path_word w, const struct path *rev, __u32 end)
{
	return !before(end, w.end) && (w.flags & PATH_FIN || after(end, path_expected(rev)));
}

/* Return the word after an acknowledgement. win: as in the header. now: as path.seen. The window of the highest
 * acknowledgement is kept, and among several with the same number the widest. */
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

/* Is `end` so far below the limit that the leg's limit_in need not be looked up? */
INLINE int path_is_far(union path_word w, __u32 end)
{
	return !(w.flags & PATH_TRIGGER) || (__s16)((end >> 16) - w.wraps) < 0;
}

/* Return the word after a segment that ends at `end`. PATH_FIN in `flags`: with a FIN. The FIN must have the highest number:
 * one with a lower number is ignored, and data beyond a recorded one shows that it was false. */
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

/* Does the segment reach the limit, or go beyond it? Then the direction is stopped, and the leg's record decides. l: that
 * record, or NULL if it is gone. Not for SYN or RST. */
INLINE int path_is_beyond(union path_word w, const struct leg *l, const struct seg *s)
{
	__u32 fin = !!(s->flags & TH_FIN), end = s->seq + s->len + fin;

	if ((w.flags & (PATH_TRIGGER | PATH_FRAGMENTS)) != PATH_TRIGGER || !after(end, w.end))
		return 0;
	return !l || fin || !before(end, l->limit_in);
}

/* ---- state that a segment changes ---- */

#define TRIES 8   /* to change a word, against other processors */
#define LOST (-1) /* all of them */

/* Convert a time in ns, CLOCK_MONOTONIC, to path.seen. */
INLINE __u8 seen_at(__u64 now)
{
	return now >> 33;
}

/* Take an entry out of force. Its `end` is final from then on. */
INLINE void stop_path(struct path *p)
{
	__sync_fetch_and_and(&p->word.all, ~((__u64)PATH_SPLICED << 48));
}

/* Advance the word to `end`, once. Returns as advance_path(), and LOST if another processor was faster. */
INLINE int try_advance_path(struct path *p, __u32 end, __u16 flags, int far)
{
	union path_word w = { .all = *(volatile __u64 *)&p->word.all }, n;

	if (!(w.flags & PATH_SPLICED))
		return 1;
	if (far && !path_is_far(w, end))
		return 1;
	n = word_moved(w, end, flags);
	if (n.all == w.all || __sync_val_compare_and_swap(&p->word.all, w.all, n.all) == w.all)
		return 0;
	return LOST;
}

/* The verifier looks at it once, and not for each of its callers. */
GLOBAL int advance_path_again(struct path *p, __u32 end, __u16 flags, int far)
{
	int i, r;

	if (!p)
		return -1;
	for (i = 1; i < TRIES; i++) {
		r = try_advance_path(p, end, flags, far);
		if (r != LOST)
			return r;
	}
	return LOST;
}

/* Advance the word to `end`. Returns 0 if done, 1 if the entry was stopped or, with `far`, if `end` is near the limit, and LOST
 * after too many lost races. */
INLINE int advance_path(struct path *p, __u32 end, __u16 flags, int far)
{
	int r = try_advance_path(p, end, flags, far);

	return r == LOST ? advance_path_again(p, end, flags, far) : r;
}

/* Was the entry stopped? Then the processor that stopped it may not have seen the latest update. To be called after an atomic
 * operation on the entry. */
INLINE int is_stopped(const struct path *p)
{
	return !(*(volatile __u16 *)&p->word.flags & PATH_SPLICED);
}

/* Does the entry wait for the acknowledgement of a FIN? Perhaps only since its word was read: a commit learns of some FINs when
 * the entries are in force already (catch_up()). */
INLINE int awaits_fin_ack(const struct path *p)
{
	return *(volatile __u16 *)&p->word.flags & PATH_PEER_FIN;
}

/* Raise the highest acknowledgement, once. Returns as advance_ack(), and LOST if another processor was faster. */
INLINE int try_advance_ack(struct path *p, __u32 ack, __u32 win, __u8 now)
{
	__u64 *at = (__u64 *)&p->max_ack;
	union path_acked a = { .all = *(volatile __u64 *)at }, n = acked_moved(a, ack, win, now);

	if (n.all == a.all)
		return 0;
	if (__sync_val_compare_and_swap(at, a.all, n.all) == a.all)
		return n.max_ack != a.max_ack && (is_stopped(p) || awaits_fin_ack(p));
	return LOST;
}

GLOBAL int advance_ack_again(struct path *p, __u32 ack, __u32 win, __u8 now)
{
	int i, r;

	if (!p)
		return -1;
	for (i = 1; i < TRIES; i++) {
		r = try_advance_ack(p, ack, win, now);
		if (r != LOST)
			return r;
	}
	return LOST;
}

/* Raise the highest acknowledgement, and record its window and the time. now: as path.seen. Writes only if something changes,
 * since a cache line that is only read can stay in the caches of several processors. Returns 0 if done, 1 if the entry was
 * stopped, or awaits_fin_ack(), and LOST after too many lost races. */
INLINE int advance_ack(struct path *p, __u32 ack, __u32 win, __u8 now)
{
	int r = try_advance_ack(p, ack, win, now);

	return r == LOST ? advance_ack_again(p, ack, win, now) : r;
}

/* Record that everything up to `end` is forwarded. Returns as advance_path(). */
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

/* Record the acknowledgement of a FIN, if `ack` is that of the FIN forwarded the other way. Returns 1 if the flow is over. */
INLINE int fin_acked(struct path *p, struct path *rev, __u32 ack)
{
	union path_word w = { .all = *(volatile __u64 *)&rev->word.all };

	if (w.flags & PATH_FIN && ack != w.end + rev->seq_add)
		return 0;
	__sync_fetch_and_and(&p->word.all, ~((__u64)PATH_PEER_FIN << 48));
	if (!(w.flags & PATH_FIN))
		return 0; /* the recorded FIN has turned out to be false */
	__sync_fetch_and_or(&rev->word.all, (__u64)PATH_FIN_ACKED << 48);
	return !!(p->word.flags & PATH_FIN_ACKED);
}

/* ---- the step ---- */

enum step {
	STEP_ON,     /* send the copies that the plan describes */
	STEP_ASK,    /* challenge the sender of an RST that is not proven */
	STEP_DROP,   /* drop it; plan.dropped says why */
	STEP_RECORD, /* the flow was stopped or committed meanwhile: look it up again */
};

/* Plan the rewrite of a forwarded segment. */
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
	if (w.flags & PATH_TRIGGER && after(urgent_end(s), s->seq + s->len)) /* the byte may be beyond the limit */
		e->flags &= ~TH_URG;
	e->keep = s->len;
	e->strip_ts = !!(w.flags & PATH_STRIP_TS);
	e->strip_sack = !!(w.flags & PATH_STRIP_SACK);
	e->strip_ecn = !(w.flags & PATH_ECN);
}

/* Bytes forwarded from `l`'s host since the commit. w: word of the leg's entry. */
INLINE __u64 path_passed(const struct leg *l, union path_word w)
{
	if (w.flags & PATH_TRIGGER)
		return w.end - l->max_in;
	return ((__u64)w.wraps << 32) + w.end - l->max_in;
}

/* Does `seq` lie between what was forwarded and the edge that was promised before the splice? Counted from the commit: gigabytes
 * may have passed since. */
INLINE int before_old_edge(const struct leg *l, union path_word w, __u32 seq)
{
	__s32 promised = l->edge_out - l->max_in;

	return promised > 0 && !before(seq, w.end) && path_passed(l, w) + (seq - w.end) <= (__u32)promised;
}

/* Is the RST in order for the receiver, or after the last segment that was forwarded? */
INLINE int path_reset_in_order(const struct path *rev, union path_word w, const struct seg *s)
{
	return s->seq == path_expected(rev) || s->seq == w.end;
}

/* Plan an RST that answers a segment of a connection that was reset (RFC 9293, 3.10.7.1). Its sender may have ignored the one
 * that was forwarded, because it was ahead of it, or because data that had left before has arrived behind it. Nobody else would
 * answer then: the socket is parked, and the host that sent the reset may have begun another connection. Returns 0 or a
 * verdict. */
INLINE int path_reset_again(const struct seg *s, struct edit *e)
{
	if (!(s->flags & TH_ACK))
		return V_NO_ACK;
	e->seq = s->ack;
	e->ack = e->win = e->urg = 0;
	e->flags = TH_RST;
	e->keep = e->stamp = 0;
	e->strip_ts = e->strip_sack = e->strip_ecn = 1;
	return 0;
}

/* The step of an RST. One that is not in order may still be genuine, if the sender's last segments were lost before they
 * arrived here. The receiver challenges it (RFC 5961, 3.2), and the answer is in order. The RST may lie beyond the receiver's
 * window, too, up to the edge that was promised before the splice (edge_out). */
INLINE enum step path_reset(struct path *p, struct path *rev, union path_word w, struct leg *l, const struct seg *s,
			    struct plan *plan)
{
	int in_order = path_reset_in_order(rev, w, s);
	__u32 at;

	if (in_order) {
		__sync_fetch_and_or(&p->word.all, (__u64)(PATH_DEAD | PATH_RST) << 48);
		__sync_fetch_and_or(&rev->word.all, (__u64)PATH_DEAD << 48);
		plan->events = 1 << EVENT_RESET;
	} else {
		if (!path_in_window(w, rev, s) && !(l && before_old_edge(l, w, s->seq))) {
			plan->dropped = V_BAD_RST;
			return STEP_DROP;
		}
		if (l)
			__sync_fetch_and_or(&l->flags, LEG_PROBE);
	}
	if (!path_reset_at(rev, s->seq, in_order, &at))
		return STEP_ASK;
	path_edit(p, w, s, &plan->f);
	plan->f.seq = at + p->seq_add;
	return STEP_ON;
}

/* Record an acceptable segment in both entries and plan its rewrite. w: the word that was checked. l: the leg's record or
 * NULL, used for an RST only. whole: 0 for a first fragment, whose end is not known, so that only its acknowledgement counts.
 * now: as path.seen. Not for SYN. */
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
	if (awaits_fin_ack(p) && fin_acked(p, rev, s->ack)) /* not by `w`: catch_up() looks at max_ack only once */
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
