/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Freeze, commit and unsplice: steps over both legs that move a flow between its legs' records and its path entries, under one
 * lock at a time. Callers do the look-ups and handle packets, so that this code can run outside of the kernel as well
 * (model.c). */
#ifndef LONGSPLICE_PATH_H
#define LONGSPLICE_PATH_H

#include "ecn.h"
#include "step.h"
#include "switch.h"

/* ---- from control mode to forwarding mode ---- */

/* Is `peer` still the leg's peer? It was looked up without the lock, and the leg may have joined another flow since. A segment
 * sent to the former peer with the numbers of the new one would acknowledge bytes that its host never sent. */
INLINE int is_paired(const struct leg *l, const struct tuple *peer)
{
	const __u32 *a = (const __u32 *)&l->peer, *b = (const __u32 *)peer;
	__u32 differ = 0, i;

	for (i = 0; i < sizeof(*peer) / sizeof(*a); i++)
		differ |= a[i] ^ b[i];
	return !differ;
}

/* May the leg enter a switch? Returns a switch_result. */
static __always_inline int ready(const struct leg *l)
{
	if (!(l->flags & LEG_TRACKED))
		return SWITCH_UNTRACKED;
	if (l->flags & LEG_RESET)
		return SWITCH_CLOSING;
	if (l->flags & LEG_FRAGMENTS)
		return SWITCH_FRAGMENTS;
	if (l->phase_in != PHASE_LOCAL || l->phase_out != PHASE_LOCAL)
		return SWITCH_BUSY;
	/* A drain was taken back, and the socket has not caught up yet. It must send the forwarded bytes again before the next
	 * freeze, or the host would acknowledge the new bound before the socket has reached it. */
	if (ahead_of_socket(l))
		return SWITCH_BUSY;
	return SWITCH_OK;
}

/* Make `peer` the leg's peer. Under l's lock. */
INLINE void pair(struct leg *l, const struct tuple *peer, __u32 tap)
{
	l->peer = *peer;
	l->flags = (l->flags & ~LEG_TAP) | LEG_PAIRED | (tap ? LEG_TAP : 0);
}

/* May l be frozen? Returns a switch_result. out: end of the bytes written to its socket or in hand for it (out space). o,
 * other: the other leg. */
static __always_inline int may_freeze(const struct leg *l, const struct half *h, const struct leg *o,
				      const struct half *other, __u32 out)
{
	int r = ready(l);

	if (r)
		return r;
	if ((l->flags & o->flags & LEG_FIN_IN) || keeps_end(l, h, other))
		return SWITCH_CLOSING;
	/* more read or acknowledged than arrived, or less written than sent: the socket got segments unseen */
	if (l->max_in - irs(l) - 1 - h->consumed > FAR || after(l->ack_local, l->max_in) || before(out, l->local_out))
		return SWITCH_MISMATCH;
	if (has_gaps(l, h))
		return SWITCH_BUSY;
	return all_has_come(l, h) ? SWITCH_SHORT : SWITCH_OK;
}

/* Were timestamps or selective acknowledgements negotiated on one leg only? A host that has negotiated timestamps drops segments
 * without (RFC 7323, 3.2), and one that has negotiated SACK counts no duplicate acknowledgements without (RFC 6675, 2). Neither
 * can be made up for a host that has not negotiated them. */
INLINE int options_differ(const struct leg *a, const struct leg *b)
{
	return !!((a->flags ^ b->flags) & (LEG_TS | LEG_SACK));
}

/* Begin a splice. Each leg is frozen under its own lock; a segment that arrives on a before b is frozen is dispatched again
 * (is_half_frozen()). now: ns, CLOCK_MONOTONIC. */
static __always_inline int freeze(struct switch_args *g, struct leg *a, struct leg *b, __u64 now)
{
	__u32 to_b, to_a, ts, done = 0;
	__u32 out_a = a->iss + 1 + g->a.produced + g->b.leftover;
	__u32 out_b = b->iss + 1 + g->b.produced + g->a.leftover;
	int r = may_freeze(a, &g->a, b, &g->b, out_a);

	if (!r)
		r = may_freeze(b, &g->b, a, &g->a, out_b);
	if (!r && options_differ(a, b))
		r = SWITCH_OPTIONS;
	if (!r && (lost_clock(a, b, now) || lost_clock(b, a, now)))
		r = SWITCH_SILENT;
	if (!r && g->fit && (overpromised(a, &g->a, out_b, b) || overpromised(b, &g->b, out_a, a)))
		r = SWITCH_WINDOW;
	if (r)
		return r;
	bpf_spin_lock(&a->lock);
	pair(a, &g->b.leg, g->tap);
	bpf_spin_unlock(&a->lock);
	bpf_spin_lock(&b->lock);
	pair(b, &g->a.leg, g->tap);
	bpf_spin_unlock(&b->lock);

	bpf_spin_lock(&a->lock);
	r = may_freeze(a, &g->a, b, &g->b, out_a);
	if (!r) {
		g->a.pending = freeze_in(a, &g->a, out_b, &to_b, g->hold);
		g->a.start = a->bound_in - irs(a) - 1;
		g->a.seq = a->bound_in;
		g->a.fin = !!(a->flags & LEG_FIN_IN);
		ts = a->tsval_in;
	}
	bpf_spin_unlock(&a->lock);
	if (r)
		return r;

	bpf_spin_lock(&b->lock);
	r = may_freeze(b, &g->b, a, &g->a, out_b);
	if (!r) {
		done = freeze_out(b, to_b, ts);
		g->b.pending = freeze_in(b, &g->b, out_a, &to_a, g->hold);
		g->b.start = b->bound_in - irs(b) - 1;
		g->b.seq = b->bound_in;
		g->b.fin = !!(b->flags & LEG_FIN_IN);
		ts = b->tsval_in;
	}
	bpf_spin_unlock(&b->lock);
	if (r) {
		bpf_spin_lock(&a->lock);
		unsplice_in(a, b, a->bound_in);
		bpf_spin_unlock(&a->lock);
		return r;
	}

	bpf_spin_lock(&a->lock);
	if (done)
		freeze_done(a);
	done = freeze_out(a, to_a, ts);
	bpf_spin_unlock(&a->lock);
	if (done) {
		bpf_spin_lock(&b->lock);
		freeze_done(b);
		bpf_spin_unlock(&b->lock);
	}
	return SWITCH_OK;
}

/* Fill in everything but the word of the entry for packets from `from`'s host. Under from's lock. */
INLINE void fill_path(struct path *p, const struct leg *from, const struct leg *to, const struct tuple *out, __u32 via)
{
	__u32 room = later(from->edge_in, from->ack_in) - from->ack_in;

	room = (room + (1u << from->wscale_in) - 1) >> from->wscale_in;
	p->max_ack = from->ack_in;
	p->via = via | room_code(room > 65535 ? 65535 : room) << VIA_ROOM_SHIFT | (from->flags & LEG_TAP ? VIA_TAP : 0);
	p->scales = from->wscale_in | to->wscale_out << 4;
	p->seq_add = from->seq_off;
	p->ack_add = -to->seq_off;
	p->tsval_add = to->ts_from_peer;
	p->tsecr_add = -from->ts_from_peer;
	p->rport = out->rport;
	p->lport = out->lport;
}

/* Return PATH_IDENTITY if packets leave on `out` with the addresses, ports and numbers with which they arrive on `in`, as
 * those of a transparent connection do if both sides were given the same numbers. Otherwise 0. */
INLINE __u16 path_identity(const struct path *p, const struct tuple *in, const struct tuple *out)
{
	int i;

	for (i = 0; i < 4; i++)
		if (in->remote[i] != out->local[i] || in->local[i] != out->remote[i])
			return 0;
	if (in->rport != out->lport || in->lport != out->rport || (p->scales & 15) != p->scales >> 4)
		return 0;
	return p->seq_add | p->ack_add | p->tsval_add | p->tsecr_add ? 0 : PATH_IDENTITY;
}

/* The flags of the entry for packets from `from`'s host. */
INLINE __u16 path_flags(const struct leg *from, const struct leg *to)
{
	__u16 f = PATH_SPLICED;

	if (!(to->flags & LEG_TS))
		f |= PATH_STRIP_TS;
	if (!(to->flags & LEG_SACK))
		f |= PATH_STRIP_SACK;
	if (from->flags & LEG_FIN_IN)
		f |= PATH_FIN;
	if ((from->flags & LEG_FIN_OUT) && !(from->flags & LEG_FIN_ACKED))
		f |= PATH_PEER_FIN;
	if ((to->flags & LEG_FIN_OUT) && (to->flags & LEG_FIN_ACKED))
		f |= PATH_FIN_ACKED;
	if (from->flags & LEG_TRIGGER)
		f |= PATH_TRIGGER;
	return f | ecn_flags(from, to);
}

/* Set the limit to the current position, if `here`: for a flow whose limit was not known at the freeze. */
INLINE void set_limit(struct leg *l, int here)
{
	if (here && !(l->flags & LEG_TRIGGER)) {
		l->limit_in = l->max_in;
		l->flags |= LEG_TRIGGER;
	}
}

/* The word of the entry for packets from `from`'s host. */
INLINE union path_word path_word(const struct leg *from, const struct leg *to)
{
	union path_word w = {};

	w.end = from->max_in;
	w.flags = path_flags(from, to);
	if (w.flags & PATH_TRIGGER)
		w.wraps = from->limit_in >> 16;
	return w;
}

enum splice_step {
	PREPARE, /* fill in the entry, without PATH_SPLICED */
	FIRST,   /* bring the first entry into force */
	SECOND,  /* bring the second entry into force, but only while the first one is */
};

/* Do one step of a commit with `p`, the entry for packets from `from`'s host, if the leg is still in forwarding mode. Both
 * entries are prepared before the first comes into force, because a packet that takes the flow back between the two derives
 * the records from both. rev: the other entry. */
static __always_inline void splice_path(enum splice_step step, struct leg *from, struct leg *to, struct path *p,
					const struct path *rev, const struct half *in, const struct half *out, __u32 via,
					int trigger, __u32 cross)
{
	union path_word w;

	bpf_spin_lock(&from->lock);
	if (from->phase_in == PHASE_FWD && from->phase_out == PHASE_FWD &&
	    (step != SECOND || *(volatile __u16 *)&rev->word.flags & PATH_SPLICED)) {
		fill_path(p, from, to, &out->leg, via);
		if (step != PREPARE)
			set_limit(from, trigger);
		w = path_word(from, to);
		w.flags |= path_identity(p, &in->leg, &out->leg) | cross | (p->word.flags & PATH_TRACE);
		if (step == PREPARE)
			w.flags &= ~PATH_SPLICED;
		else
			from->flags = (from->flags & ~LEG_HOLD) | LEG_SPLICED;
		*(volatile __u64 *)&p->word.all = w.all;
	}
	bpf_spin_unlock(&from->lock);
}

/* Carry over a FIN, its acknowledgement or an RST from the record of `to`. Between the moments at which the two entries come into
 * force, packets may record these in a leg that is not read any more. Called for each entry, once both are in force. to, rev: the
 * leg where p's packets leave, and the entry for packets that arrive there. */
INLINE void catch_up(struct path *p, struct path *rev, const struct leg *to)
{
	__u32 flags = *(volatile __u32 *)&to->flags;

	if (flags & LEG_RESET)
		__sync_fetch_and_or(&p->word.all, (__u64)(PATH_DEAD | (flags & LEG_RESET_IN ? 0 : PATH_RST)) << 48);
	if (p->word.flags & PATH_DEAD)
		__sync_fetch_and_or(&rev->word.all, (__u64)PATH_DEAD << 48);
	if ((p->word.flags & (PATH_FIN | PATH_FIN_ACKED)) != PATH_FIN)
		return;
	/* First: a packet that has not moved max_ack yet will find it (awaits_fin_ack()). */
	__sync_fetch_and_or(&rev->word.all, (__u64)PATH_PEER_FIN << 48);
	if (flags & LEG_FIN_ACKED || *(volatile __u32 *)&rev->max_ack == p->word.end + p->seq_add) {
		__sync_fetch_and_and(&rev->word.all, ~((__u64)PATH_PEER_FIN << 48));
		__sync_fetch_and_or(&p->word.all, (__u64)PATH_FIN_ACKED << 48);
	}
}

static __always_inline int may_commit(const struct switch_args *g, const struct leg *a, const struct leg *b)
{
	if ((a->flags | b->flags) & LEG_RESET)
		return SWITCH_CLOSING;
	if ((a->flags | b->flags) & LEG_SPLICED) /* committed already: the records are stale */
		return SWITCH_BUSY;
	if (a->phase_in != PHASE_FWD || a->phase_out != PHASE_FWD || b->phase_in != PHASE_FWD || b->phase_out != PHASE_FWD)
		return SWITCH_BUSY;
	/* The short way would pass on the receiver's window with the last acknowledgement. */
	if (g->fit && (has_passed(a) || has_passed(b)))
		return SWITCH_SHORT;
	return SWITCH_OK;
}

/* Commit a splice. cross_a, cross_b: more flags for the entries, PATH_CROSS or 0. */
static __always_inline void commit_legs(const struct switch_args *g, struct leg *a, struct leg *b, struct path *pa,
					struct path *pb, __u32 cross_a, __u32 cross_b)
{
	bpf_spin_lock(&a->lock);
	settle_tsval(a, b->tsval_in);
	bpf_spin_unlock(&a->lock);
	bpf_spin_lock(&b->lock);
	settle_tsval(b, a->tsval_in);
	bpf_spin_unlock(&b->lock);
	splice_path(PREPARE, a, b, pa, pb, &g->a, &g->b, g->via_b, 0, cross_a);
	splice_path(PREPARE, b, a, pb, pa, &g->b, &g->a, g->via_a, 0, cross_b);
	splice_path(FIRST, a, b, pa, pb, &g->a, &g->b, g->via_b, g->trigger & 1, cross_a);
	splice_path(SECOND, b, a, pb, pa, &g->b, &g->a, g->via_a, g->trigger & 2, cross_b);
	catch_up(pa, pb, b);
	catch_up(pb, pa, a);
}

/* ---- from forwarding mode back to a leg's record ---- */

/* A host may not use a window smaller than this, bytes: it waits for room for a segment or two (RFC 9293, 3.8.6.2.1), which are
 * rarely larger. */
#define SMALL_WINDOW 16384

/* Derive l's record from the path entries, if it is stale. Under l's lock. in, out: the entries for packets from l's host and for
 * packets to it, both stopped. o: the other leg. now: ns, CLOCK_MONOTONIC. */
INLINE void wake(struct leg *l, const struct leg *o, const struct path *in, const struct path *out, __u64 now)
{
	__u32 end = in->word.end;

	if (!(l->flags & LEG_SPLICED))
		return;
	l->flags &= ~LEG_SPLICED;
	/* Only the entries have moved these numbers since the commit, and perhaps by gigabytes or months. So nothing here is compared
	 * with what the record says: that may be more than 2^31 away. */
	l->in64 += path_passed(l, in->word);
	l->max_in = end;
	l->max_out = out->word.end + out->seq_add;
	l->ack_in = in->max_ack;
	if (l->flags & o->flags & LEG_TS) {
		l->tsval_out = tsval_reached(l, o, now);
		l->flags |= LEG_UNTIMED;
	}
	l->flags |= LEG_CLOCK;
	l->edge_in = l->ack_in + (room_of((in->via & VIA_ROOM) >> VIA_ROOM_SHIFT) << l->wscale_in);
	l->ack_out = out->max_ack + out->ack_add;
	l->edge_out = later(l->ack_out + ((__u32)65535 << l->wscale_out), end);
	l->win_out = l->edge_out - l->ack_out > 65535 ? 65535 : l->edge_out - l->ack_out;
	/* The other host may have closed its window. Only the socket will see it open again, so l's host would wait for the
	 * answer to its next probe, perhaps for a minute. */
	if (room_of((out->via & VIA_ROOM) >> VIA_ROOM_SHIFT) << o->wscale_in < SMALL_WINDOW)
		l->flags |= LEG_PROBE;
	if (in->word.flags & PATH_FIN)
		l->flags |= LEG_FIN_IN;
	if (out->word.flags & PATH_FIN)
		l->flags |= LEG_FIN_OUT;
	if (out->word.flags & PATH_FIN_ACKED)
		l->flags |= LEG_FIN_ACKED;
	if ((in->word.flags | out->word.flags) & PATH_DEAD)
		l->flags |= LEG_RESET;
	if ((in->word.flags | out->word.flags) & PATH_FRAGMENTS)
		l->flags |= LEG_FRAGMENTS;
}

/* Would the RST overtake data that the proxy keeps in the socket, such as a reply that has come early? Then the direction is
 * stopped, and the leg's record decides. l: that record, or NULL. */
INLINE int path_reset_waits(const struct path *rev, union path_word w, const struct leg *l, const struct seg *s)
{
	return l && s->flags & TH_RST && !(s->flags & TH_SYN) && w.flags & PATH_TRIGGER && !(w.flags & PATH_DEAD) && keeps_data(l) &&
	       path_reset_in_order(rev, w, s);
}

/* Stop both path entries of a flow and wake() both legs. An entry comes into force under its leg's lock, and the second one only
 * while the first is (splice_path()). So once both were stopped, and each lock was then held once, neither can come into force
 * again, and their values are final. */
static __always_inline void wake_both(struct leg *a, struct leg *b, struct path *pa, struct path *pb, __u64 now)
{
	stop_path(pa);
	stop_path(pb);
	bpf_spin_lock(&b->lock);
	stop_path(pb);
	bpf_spin_unlock(&b->lock);
	bpf_spin_lock(&a->lock);
	stop_path(pa);
	wake(a, b, pa, pb, now);
	bpf_spin_unlock(&a->lock);
	bpf_spin_lock(&b->lock);
	wake(b, a, pb, pa, now);
	bpf_spin_unlock(&b->lock);
}

/* Take the direction from -> to back to control mode. Both legs' records are awake. */
static __always_inline void unsplice_direction(struct leg *from, struct leg *to)
{
	__u32 at, at_out;
	int done;

	bpf_spin_lock(&to->lock);
	stop_drain(to);
	bpf_spin_unlock(&to->lock);
	bpf_spin_lock(&from->lock);
	at = from->max_in;
	at_out = at + from->seq_off;
	done = unsplice_in(from, to, at);
	bpf_spin_unlock(&from->lock);
	if (!done)
		return;
	bpf_spin_lock(&to->lock);
	done = unsplice_out(to, at_out);
	bpf_spin_unlock(&to->lock);
	if (done) {
		bpf_spin_lock(&from->lock);
		unsplice_done(from);
		bpf_spin_unlock(&from->lock);
	}
}

/* Read phase and positions of a leg for user space. p: the leg's path entry, or NULL. */
static __always_inline void read_positions(struct half *h, __u64 *end, __u64 *origin, struct leg *l, const struct path *p)
{
	bpf_spin_lock(&l->lock);
	h->phase_in = l->phase_in;
	h->start = l->bound_in - irs(l) - 1;
	h->flags = l->flags;
	*end = l->in64;
	*origin = l->in64 - l->max_in;
	if (p && l->flags & LEG_SPLICED) {
		union path_word w = { .all = *(volatile __u64 *)&p->word.all };

		*end += path_passed(l, w);
	}
	bpf_spin_unlock(&l->lock);
}

/* Report whether the direction from `from`'s host was being forwarded when it was taken back, and whether its FIN was. */
INLINE void was_bypassed(struct half *h, const struct leg *from)
{
	h->pending = !!(from->flags & LEG_BYPASSED);
	h->fin = h->pending && from->flags & LEG_FIN_IN && from->max_in == from->bound_in;
}

#endif
