/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What becomes of a segment while a flow is tracked, switching or switching back.
 *
 * Theory of operation. Each direction of a flow has a phase (flow.h) and, while it switches, a bound: one position in the
 * stream, known in both legs' spaces. Below and above it the bytes belong to different owners, local socket and data path,
 * and so do the acknowledgements for them. A segment from a host carries data of one direction and the acknowledgement of
 * the other, so up to two copies leave: one for the local socket, one for the other host. Everything here is arithmetic on
 * one leg at a time, under that leg's lock; nothing is called and nothing is sent. The rules that keep hosts from ignoring
 * what they get (design, 4.4):
 *   - a segment to a host never acknowledges less than an earlier one did, and carries the window that belongs to its
 *     acknowledgement;
 *   - a segment without data carries the highest sequence number sent so far, but not beyond the host's window;
 *   - TSval never goes back.
 */
#ifndef LONGSPLICE_SWITCH_H
#define LONGSPLICE_SWITCH_H

#include "clock.h"
#include "ecn.h"
#include "segment.h"

INLINE void advance_in(struct leg *l, __u32 end)
{
	if (after(end, l->max_in)) {
		l->in64 += end - l->max_in;
		l->max_in = end;
		l->flags &= ~LEG_FIN_IN; /* what has more behind it was no end */
	}
}

/* How far the local socket's window reaches. */
INLINE __u32 edge_local(const struct leg *l)
{
	return l->ack_local + l->win_local;
}

/* The right edge that the host was told last. edge_out may be beyond it: after forwarding mode it is an upper bound. */
INLINE __u32 edge_promised(const struct leg *l)
{
	return l->ack_out + l->win_out;
}

/* A segment without data must be acceptable to the host (RFC 9293, 3.10.7.4): not beyond its window. */
INLINE __u32 pure_ack_seq(const struct leg *l)
{
	return earlier(l->max_out, l->edge_in);
}

/* The verdict on a segment that the local socket, or the other host, would not accept (RFC 9293, 3.10.7.4; RFC 5961, 5), or 0.
 * Nothing is learnt from such. Old ones are acceptable down to a window below: they may be sent again. What was held was
 * acceptable when it came. Not for SYN, RST. */
INLINE __u32 refuses(const struct leg *l, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);

	if (!(s->flags & TH_ACK))
		return V_NO_ACK;
	if (after(s->seq, l->edge_out) || (__s32)(l->ack_out - end) > (__s32)(65535 << l->wscale_out) + 1)
		return V_OUT_OF_WINDOW;
	if (after(s->ack, l->max_out) || (!s->again && (__s32)(l->ack_in - s->ack) > (__s32)(65535 << l->wscale_in)))
		return V_BAD_ACK;
	return 0;
}

/* RST from a host: in order it counts, otherwise it does not (RFC 5961, 3.2). */
INLINE int rst_in_order(const struct leg *l, const struct seg *s)
{
	return s->seq == l->ack_out || s->seq == l->max_in;
}

/* The host has heard the end of both directions, and forgotten the connection: it answers late segments with RST. */
INLINE int is_over(const struct leg *l)
{
	return l->flags & LEG_FIN_IN && l->flags & LEG_FIN_ACKED && l->ack_out == l->max_in;
}

/* Is this new, and beyond what may be forwarded? */
INLINE int is_beyond(const struct leg *l, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);

	return l->flags & LEG_TRIGGER && after(end, l->max_in) && (s->flags & TH_FIN || after(end, l->limit_in));
}

/* Has all been forwarded that may be? */
INLINE int all_passed(const struct leg *l)
{
	return l->flags & LEG_TRIGGER && l->max_in == l->limit_in;
}

/* What is beyond: its direction goes back to control mode at once, but for one that has bytes to forward and drains: that does
 * not get what it would have to throw away (host_segment). */
INLINE int takes_back(const struct leg *l, const struct seg *s)
{
	return is_beyond(l, s) && !refuses(l, s) &&
	       (l->phase_in == PHASE_FWD || (l->phase_in == PHASE_TO_FWD && l->limit_in == l->bound_in));
}

/* Is a freeze under way on another processor, which has not come to the other leg yet? */
INLINE int is_half_frozen(const struct leg *l, const struct leg *o)
{
	return l->phase_in == PHASE_TO_FWD && *(volatile __u8 *)&o->phase_out == PHASE_LOCAL;
}

/* Will data of this segment be forwarded? Read without the lock: a hint, for what must be known before. */
INLINE int to_be_forwarded(const struct leg *l, const struct seg *s)
{
	if (!s->len || l->phase_in == PHASE_LOCAL || refuses(l, s))
		return 0;
	if (l->phase_in == PHASE_TO_FWD)
		return after(s->seq + s->len, l->bound_in);
	return l->phase_in == PHASE_FWD || before(s->seq, l->bound_in);
}

/* ---- from a host, step 1: under the lock of the leg it came in on ---- */

INLINE void learn_from_host(struct leg *l, const struct seg *s, struct plan *p)
{
	p->win = (__u32)s->win << l->wscale_in;
	p->in_order_ts = 0;
	if (s->has_ts && is_news(l, s)) {
		l->tsval_in = s->tsval;
		p->in_order_ts = 1;
	}
	/* The echo is the last TSval the host took (RFC 7323, 4.3): ours must not be older, whatever clock it has come from. */
	if (s->has_ts && after(s->tsecr, l->tsval_out))
		l->tsval_out = s->tsecr;
	if (!before(s->ack, l->ack_in)) {
		l->ack_in = s->ack;
		l->edge_in = s->ack + p->win;
	}
	if ((l->flags & LEG_FIN_OUT) && s->ack == l->max_out)
		l->flags |= LEG_FIN_ACKED;
}

/* Has the host been sent more than the local socket knows of? Not only while data are forwarded: a drain that was taken back
 * leaves bytes behind that the socket will send once more. */
INLINE int ahead_of_socket(const struct leg *l)
{
	return l->phase_out != PHASE_LOCAL || l->flags & LEG_AHEAD;
}

/* In control mode, and the socket's numbers are those of the wire. */
INLINE int untouched(const struct leg *l)
{
	return l->phase_in == PHASE_LOCAL && !ahead_of_socket(l) && !(l->shim_in | l->shim_out | l->shim_ts);
}

/* The copy for the local socket. `data`: it carries data or FIN of the local region. */
INLINE void edit_for_local(const struct leg *l, const struct seg *s, struct plan *p, int data)
{
	struct edit *e = &p->l;
	__u32 lo = s->ack - FAR, hi = s->ack + FAR;
	__u32 ack = s->ack;

	if (ahead_of_socket(l)) {
		hi = l->local_out;
		ack = earlier(ack, hi);
	}
	if (l->phase_out == PHASE_TO_LOCAL) {
		lo = l->bound_out;
		ack = later(ack, lo);
	}
	/* A socket that has heard the end of both directions is gone. While its acknowledgement of the host's FIN is held back,
	 * the FIN comes again, and must find it. */
	if (l->phase_in == PHASE_TO_LOCAL && l->flags & LEG_FIN_OUT && ack == l->max_out)
		ack--;
	/* A bare acknowledgement may stand beyond data that were lost, and are forwarded when they come again. The socket does not
	 * hear of such numbers: whatever comes later below them would be old to it, and tell it no window (RFC 9293, 3.10.7.4). */
	e->seq = (data ? s->seq : l->phase_in == PHASE_LOCAL ? earlier(s->seq, l->max_in) : l->ack_local) - l->shim_in;
	e->ack = ack - l->shim_out;
	e->tsval = s->tsval;
	e->tsecr = s->tsecr - l->shim_ts;
	e->sack_add = -l->shim_out;
	e->sack_lo = lo;
	e->sack_hi = hi;
	e->win = s->win;
	e->urg = s->urg;
	e->strip_ts = e->strip_sack = e->strip_ecn = 0;
}

/* Has our socket given up the connection, or the other leg's, before the host did? */
INLINE int is_given_up(const struct leg *l)
{
	return (l->flags & (LEG_RESET | LEG_RESET_IN)) == LEG_RESET;
}

/* Does the socket have other numbers than the host, or will it have? */
INLINE int is_switching(const struct leg *l)
{
	return l->phase_in | l->phase_out || l->flags & LEG_AHEAD;
}

/* Linux resets at the edge of the window that it knows (tcp_acceptable_seq()), if that has shrunk below what it had sent, and the
 * close swallows acknowledgements that come meanwhile. The receiver is beyond such a reset, and there is no other. No reset is
 * older than the largest window that its host may have been given. */
INLINE int is_late(const struct leg *l, __u32 seq)
{
	return before(seq, l->ack_out) && l->ack_out - seq <= (__u32)65535 << l->wscale_out;
}

/* In control mode a reset is the socket's affair. One in order counts. The socket gets it with the number that it has
 * acknowledged, for it may lack the bytes before, and takes nothing beyond its window. Windows shrink in an unsplice, and the
 * host may have used the larger one: a reset beyond the edge of today comes just before it, for the socket to ask the host (RFC
 * 5961, 3.2): the edge itself is in order for a socket that has received all up to there meanwhile. So does one that is late. */
INLINE void reset_for_local(struct leg *l, const struct seg *s, struct plan *p)
{
	__u32 edge = edge_local(l), seq = s->seq;

	edit_for_local(l, s, p, 1);
	p->l.keep = s->len;
	p->l.flags = s->flags;
	if (rst_in_order(l, s)) {
		l->flags |= LEG_RESET | LEG_RESET_IN;
		seq = l->ack_local;
	} else if (((after(seq, edge) && !after(seq, l->edge_out)) || is_late(l, seq)) && edge - l->ack_local > 1) {
		seq = edge - 1;
	}
	p->l.seq = seq - l->shim_in;
}

/* A RST that is not in order while the flow is switching moves nothing. If it lies in the window or is late, its sender is asked
 * (RFC 5961, 3.2): by the socket, whose challenge leaves as any of its segments, or by the other host, if the socket is muted or
 * the number lies among bytes that were forwarded. After an unsplice the other host's question would not be passed on: the socket
 * asks then (LEG_PROBE). Returns 0 if it is neither. */
INLINE int unproven_reset(struct leg *l, const struct seg *s, struct plan *p)
{
	if (after(s->seq, l->edge_out) || (before(s->seq, l->ack_out) && !is_late(l, s->seq)))
		return 0;
	reset_for_local(l, s, p);
	l->flags |= LEG_PROBE;
	p->fwd = (l->phase_in == PHASE_FWD && l->phase_out == PHASE_FWD) ||
		 (l->phase_in == PHASE_TO_LOCAL && before(s->seq, l->bound_in));
	p->local = !p->fwd;
	p->l.keep = p->f.keep = 0; /* a message in it is of no use to anybody (RFC 9293, 3.10.7.4) */
	p->f.flags = s->flags;
	p->f.seq = s->seq + l->seq_off;
	p->f.win = p->f.urg = 0;
	p->f.strip_ts = p->f.strip_sack = p->f.strip_ecn = 1;
	return 1;
}

/* What unproven_reset() leaves for the leg where it goes out. The other host ignores a reset outside of its window. One that is
 * late is not moved into the window, where hosts of old take any: a keep-alive (RFC 9293, 3.8.4) in its stead makes it answer. */
INLINE void ask_other(const struct leg *o, struct plan *p)
{
	if (before(p->f.seq, o->ack_in)) {
		p->f.seq = o->ack_in - 1;
		p->f.flags = TH_ACK;
	} else if (after(p->f.seq, o->edge_in) && o->edge_in - o->ack_in > 1) {
		p->f.seq = o->edge_in - 1;
	}
	p->f.ack = o->ack_out;
}

/* A reset while the flow is switching goes to both: the socket may be gone. Under the lock of the leg it came in on ... */
INLINE void host_reset(struct leg *l, const struct seg *s, struct plan *p)
{
	l->flags |= LEG_RESET | LEG_RESET_IN;
	edit_for_local(l, s, p, 0);
	p->l.keep = p->f.keep = 0;
	p->l.flags = p->f.flags = s->flags;
	p->local = 1;
	p->fwd = !s->len; /* a reset with a message (RFC 9293, 3.10.7.4) stays here */
	p->f.tsval = s->tsval;
	p->f.tsecr = s->tsecr;
	p->f.sack_add = 0;
	p->f.strip_ts = p->f.strip_sack = p->f.strip_ecn = 1;
}

/* ... and of the other. */
INLINE void forward_reset(struct leg *o, struct plan *p)
{
	p->f.seq = o->ack_in; /* exactly what it expects (RFC 5961, 3.2) */
	p->f.ack = o->ack_out;
	p->f.win = p->f.urg = 0;
	o->flags |= LEG_RESET;
}

/* The kernel cuts no packet to more than 16064 bytes (BPF_SKB_MAX_LEN with pages of 4 KB), all headers included. */
#define MOST_CUT (11 * 1448)

/* Payload bytes up to `end`, or fewer, if a large packet cannot be cut there: the rest has to come again, as if it were lost. */
INLINE __u32 cut_at(const struct seg *s, __u32 end)
{
	__u32 keep = end - s->seq;

	return keep < s->len && keep > MOST_CUT ? MOST_CUT : keep;
}

/* Bytes of one flow and direction that are held at most: a large window, of which much was sent twice. */
#define MOST_HELD (8 << 20)

/* Is this held? After the drain nothing overtakes what was. But what is next in order goes on: what was held may be lost with its
 * process, and comes again from its host. */
INLINE int is_to_be_held(const struct leg *l, const struct seg *s, __u32 end)
{
	if (!(l->flags & LEG_HOLD))
		return 0;
	if (l->phase_in == PHASE_TO_FWD)
		return after(end, l->bound_in);
	return !s->again && after(s->seq, l->max_in) && l->held + s->len <= MOST_HELD;
}

/* All that comes from the host is forwarded: the end of holding, unless some of what was held is still to come. */
INLINE void forwards(struct leg *l)
{
	l->phase_in = PHASE_FWD;
	if (!before(l->max_in, l->held_in))
		l->flags &= ~LEG_HOLD;
}

/* Which bytes go where, and is the bare acknowledgement worth a copy? Returns 0 when the segment is not acceptable. */
INLINE int host_segment(struct leg *l, const struct seg *s, struct plan *p)
{
	__u32 fin = !!(s->flags & TH_FIN);
	__u32 end = s->seq + s->len + fin;
	__u32 old_ack = l->ack_in;
	__u32 local_end = s->seq; /* local data: [seq, local_end) */
	__u32 come = l->max_in;
	int pure = end == s->seq;
	int advanced, sent;

	p->local = p->fwd = p->fwd_data = p->ack_valid = p->drained = p->returned = 0;
	p->hold = HOLD_NOT;
	p->lose_local = p->lose_fwd = 0;
	p->dropped = refuses(l, s);
	if (p->dropped && !is_given_up(l) && (l->phase_in != PHASE_LOCAL || ahead_of_socket(l)))
		return 0;
	if (p->dropped || is_given_up(l)) {
		/* In control mode it is the socket's affair, which may answer. And a host that did not take the reset of our socket, in
		 * the middle of a switch perhaps, is told so again by the kernel. */
		if (!p->dropped)
			learn_from_host(l, s, p);
		p->local = 1;
		p->l.keep = s->len;
		p->l.flags = s->flags;
		edit_for_local(l, s, p, 1);
		return 1;
	}
	learn_from_host(l, s, p);
	advanced = after(l->ack_in, old_ack);

	/* data */
	p->f.keep = p->l.keep = s->len;
	p->f.flags = p->l.flags = s->flags;
	p->fwd_end = end;
	if (pure || l->phase_in == PHASE_LOCAL) {
		local_end = end;
		p->local = !pure;
		/* A bare acknowledgement may stand beyond data, or a FIN, that were lost: those have not come. */
		if (!pure)
			advance_in(l, end);
	} else if (is_to_be_held(l, s, end)) {
		p->held_from = 0;
		if (l->phase_in == PHASE_TO_FWD && before(s->seq, l->bound_in)) {
			local_end = l->bound_in;
			p->local = 1;
			p->held_from = earlier(local_end, s->seq + s->len) - s->seq;
		}
		p->hold = l->held + s->len <= MOST_HELD ? HOLD : HOLD_FULL;
		if (p->hold == HOLD) {
			l->held += s->len;
			l->held_in = later(l->held_in, end);
		}
	} else if (l->phase_in == PHASE_FWD) {
		p->fwd = 1;
		advance_in(l, end);
		forwards(l);
	} else if (l->phase_in == PHASE_TO_FWD) {
		local_end = earlier(end, l->bound_in);
		p->local = before(s->seq, l->bound_in);
		p->fwd = after(end, l->bound_in);
		/* A copy across the bound is forwarded whole, for what lies below arrives unchanged from the socket. Where the
		 * proxy may have changed it, or the socket lacks some of it, the host will have to send again, from the bound. */
		if (p->local && (before(s->seq, l->verbatim) || before(l->ack_local, l->bound_in)))
			p->fwd = 0;
		if (p->fwd && is_beyond(l, s)) {
			/* The drain is not to be lost for it: it will come again. */
			p->fwd = s->len && before(s->seq, l->limit_in);
			p->f.keep = cut_at(s, earlier(s->seq + s->len, l->limit_in));
			p->f.flags &= ~TH_FIN;
			p->fwd_end = s->seq + p->f.keep;
		}
		if (p->fwd)
			advance_in(l, p->fwd_end);
		else if (!p->local)
			p->dropped = V_BEYOND_LIMIT;
	} else { /* TO_LOCAL */
		p->fwd = before(s->seq, l->bound_in) && before(l->ack_out, l->bound_in);
		p->local = after(end, l->bound_in);
		local_end = p->local ? end : s->seq;
		if (p->fwd && p->local) {
			/* Only the first part goes on. The socket gets all: what lies below is old to it. */
			p->f.keep = cut_at(s, l->bound_in);
			p->f.flags &= ~TH_FIN;
			p->fwd_end = s->seq + p->f.keep;
		}
		if (!p->fwd && !p->local)
			p->local = 1, local_end = end; /* old data: the socket answers with its acknowledgement */
		advance_in(l, end);
	}
	p->fwd_data = p->fwd;
	plan_marks(l, s, p, come, local_end);
	if (p->local && local_end != end) {
		p->l.keep = cut_at(s, local_end);
		p->l.flags &= ~TH_FIN;
	}

	if (fin && end == l->max_in) /* not if it was held or cut off: it will come again */
		l->flags |= LEG_FIN_IN;

	/* The socket has caught up only when it has heard so: to unsplice again, with other shims, while it still has something
	 * to retransmit would put old bytes in the place of new ones. */
	if (l->flags & LEG_AHEAD && l->phase_out == PHASE_LOCAL && l->local_out == l->max_out && s->flags & TH_ACK &&
	    s->ack == l->local_out) {
		l->flags &= ~LEG_AHEAD;
		p->local = 1;
		advanced = 1;
	}

	/* acknowledgement: who hears of it */
	edit_for_local(l, s, p, p->local);
	if (!p->local)
		p->l.keep = 0, p->l.flags &= ~TH_FIN;
	p->ack = s->ack;
	p->f.tsval = s->tsval;
	p->f.tsecr = s->tsecr - l->ts_from_peer;
	p->f.seq = s->seq + l->seq_off;
	p->f.sack_lo = s->ack - FAR;
	p->f.sack_hi = s->ack + FAR;
	switch (l->phase_out) {
	case PHASE_LOCAL:
		p->local |= pure || advanced;
		break;
	case PHASE_TO_FWD:
		p->local |= pure || advanced;
		/* What lies below the bound may have reached the host by a copy across it. Until the socket has sent it too, there is
		 * a way back, and the sender is told of nothing beyond. */
		sent = !before(l->local_out, l->bound_out);
		p->ack_valid = sent && !before(s->ack, l->bound_out);
		p->fwd |= p->ack_valid && (pure || advanced);
		p->f.sack_lo = l->bound_out;
		if (sent && !before(l->ack_in, l->bound_out)) {
			l->phase_out = PHASE_FWD;
			p->drained = 1;
		}
		break;
	case PHASE_FWD:
		p->ack_valid = 1;
		p->fwd |= pure || advanced;
		break;
	case PHASE_TO_LOCAL:
		p->local |= !before(s->ack, l->bound_out) && (pure || advanced);
		p->ack_valid = 1;
		p->ack = earlier(s->ack, l->bound_out);
		p->f.sack_hi = l->bound_out;
		p->fwd |= pure || advanced;
		if (!before(l->ack_in, l->bound_out)) {
			l->phase_out = PHASE_LOCAL;
			p->returned = 1;
			p->fwd = 1;
		}
		break;
	}
	if (p->fwd && !p->fwd_data)
		p->f.keep = 0, p->f.flags &= ~TH_FIN;
	/* The socket hears of an urgent byte with that byte, and not before: until it has come, another owner may get it. So does the
	 * other host, unless all that comes is its. */
	if (after(urgent_end(s), local_end))
		p->l.flags &= ~TH_URG;
	if ((l->phase_in != PHASE_FWD || l->flags & LEG_TRIGGER) && (!p->fwd_data || after(urgent_end(s), p->fwd_end)))
		p->f.flags &= ~TH_URG;
	point_at_urgent(&p->l, s, -l->shim_in);
	return p->local || p->fwd;
}

/* Does the socket get it as it is? After step 1. */
INLINE int is_plain(const struct leg *l, const struct seg *s, const struct plan *p)
{
	return untouched(l) && !p->returned && p->l.seq == s->seq && p->l.flags == s->flags;
}

/* ---- from a host, step 2: under the lock of the other leg, where the forwarded copy goes out ---- */
INLINE void forward_segment(struct leg *o, const struct seg *s, struct plan *p)
{
	struct edit *e = &p->f;
	__u32 ack = o->ack_out, win = o->win_out, shift = e->seq - s->seq;

	if (p->drained && o->phase_in == PHASE_TO_FWD) /* not if it was taken back meanwhile */
		forwards(o);
	if (p->ack_valid) {
		__u32 a = p->ack - o->seq_off;

		if (p->returned)
			a = later(a, o->ack_local);
		if (!before(a, ack)) {
			ack = a;
			win = p->win;
			/* what comes beyond the bound or limit is for the local socket, and all below it was sent already */
			if (o->phase_in == PHASE_TO_LOCAL || all_passed(o))
				win = later(edge_local(o), ack) - ack;
		}
		if (!before(ack, o->ack_out)) {
			o->ack_out = ack;
			o->win_out = win;
		}
	}
	if (p->returned && o->phase_in == PHASE_TO_LOCAL)
		o->phase_in = PHASE_LOCAL;
	e->ack = o->ack_out;
	e->win = window_field(o->win_out, o->wscale_out);
	o->edge_out = later(o->edge_out, e->ack + ((__u32)e->win << o->wscale_out));
	if (p->fwd_data) {
		__u32 end = p->fwd_end + shift;

		o->max_out = later(o->max_out, end);
		if (o->phase_out == PHASE_LOCAL && after(end, o->local_out)) /* taken back meanwhile */
			o->flags |= LEG_AHEAD;
		if (e->flags & TH_FIN)
			o->flags |= LEG_FIN_OUT;
	} else {
		e->seq = pure_ack_seq(o);
	}
	point_at_urgent(e, s, shift);
	e->sack_add = -o->seq_off;
	e->strip_ts = !(o->flags & LEG_TS);
	e->strip_sack = !(o->flags & LEG_SACK) || !p->ack_valid;
	join_marks(o, p);
	if (s->has_ts)
		e->tsval = our_tsval(o, s->tsval, p->in_order_ts, &o->ts_from_peer);
	if (s->again) /* what its host has said since has gone before it */
		e->tsval = later(e->tsval, o->tsval_out);
}

/* Are both copies cut? Then only the socket gets its own: the other host will hear of it from the next segment. */
INLINE int is_straddle(const struct seg *s, const struct plan *p)
{
	return p->local && p->fwd && p->l.keep < s->len && p->f.keep < s->len;
}

/* Without it, the other host would not hear of the end, for what it sends is forwarded. After local_segment. */
INLINE int gives_up_both(const struct leg *l, const struct plan *p)
{
	return p->l.flags & TH_RST && l->flags & LEG_PAIRED && is_switching(l);
}

/* The end of stream of a socket whose process has died with bytes in hand would be a lie: before the bound of a drain, or in the
 * place of what was forwarded in a drain that was taken back. */
INLINE int is_false_end(const struct leg *l, __u32 end)
{
	if (l->phase_out == PHASE_TO_FWD)
		return before(end, l->bound_out);
	return l->flags & LEG_AHEAD && before(end - !(l->flags & LEG_FIN_OUT), l->max_out);
}

/* ---- from the local socket: under the leg's lock. `room`: how far the other host's window reaches, in in space ---- */
INLINE int local_segment(struct leg *l, const struct seg *s, struct plan *p, __u32 room)
{
	struct edit *e = &p->l;
	__u32 fin = !!(s->flags & TH_FIN);
	__u32 seq = s->seq + l->shim_out;
	__u32 end = seq + s->len + fin;
	__u32 ack = s->ack + l->shim_in;
	__u32 win = (__u32)s->win << l->wscale_out;

	p->dropped = V_LOCAL_MUTED;
	/* The socket believes in what it has said, muted or not: to be remembered for the way back. */
	if ((s->flags & TH_ACK) && !before(ack, l->ack_local)) {
		l->ack_local = ack;
		l->win_local = win;
	}
	/* Before the commit a reset may end the flow: then its host hears of it from the socket, too. */
	if (l->phase_in == PHASE_FWD && l->phase_out == PHASE_FWD && !(l->flags & LEG_RESET && s->flags & TH_RST))
		return 0;
	e->keep = s->len;
	e->flags = s->flags;
	e->strip_ts = e->strip_sack = e->strip_ecn = 0;
	if (s->flags & TH_RST || (fin && is_false_end(l, end)) || (end != seq && is_given_up(l) && is_switching(l))) {
		e->flags = s->flags & TH_RST ? s->flags : TH_RST | TH_ACK;
		e->keep = 0;
		/* The far end insists on its exact next sequence number (RFC 5961, 3.2). */
		if (is_switching(l))
			seq = l->ack_in;
		l->flags |= LEG_RESET;
	} else if (end != seq) {
		if (l->phase_out == PHASE_FWD)
			return 0;
		/* The socket may have missed the last acknowledgement (the copy was lost or old, or is held back), and the host need
		 * not speak again. What it sends again from before an unsplice has no place under the new shim: other bytes were
		 * forwarded there. A keep-alive goes in its stead (RFC 9293, 3.8.4), and the answer tells it. */
		if (l->phase_out == PHASE_LOCAL)
			l->bound_out = later(l->bound_out, l->ack_in);
		if (l->shim_out && !(l->flags & LEG_AHEAD) && before(seq, l->phase_out == PHASE_TO_FWD ? l->ack_in : l->bound_out)) {
			l->local_out = later(l->local_out, earlier(end, l->ack_in));
			e->flags = TH_ACK;
			e->keep = fin = 0;
			seq = end = l->ack_in - 1;
		}
		if (l->phase_out == PHASE_TO_FWD && after(end, l->bound_out)) {
			/* The socket was closed while it drained: its FIN is not the flow's. */
			if (!fin || end != l->bound_out + 1)
				return 0;
			e->flags &= ~TH_FIN;
			end--;
			fin = 0;
			if (end == seq)
				return 0;
		}
		l->local_out = later(l->local_out, end);
		l->max_out = later(l->max_out, end);
		if (fin)
			l->flags |= LEG_FIN_OUT;
	} else if (ahead_of_socket(l) && !before(seq, earlier(l->ack_in, l->local_out))) {
		seq = pure_ack_seq(l); /* but window probes, below ack_in, stay what they are */
	} else if (l->flags & LEG_PROBE && seq == l->ack_in - 1) {
		/* But for the first one of a socket that may speak again: a host does not read the window of an old segment. */
		seq = pure_ack_seq(l);
		l->flags &= ~LEG_PROBE;
	}

	if (s->flags & TH_ACK) {
		if (l->phase_in == PHASE_TO_FWD && after(ack + win, room))
			win = after(room, ack) ? room - ack : 0;
		if (l->phase_in == PHASE_FWD) {
			ack = l->ack_out;
			win = l->win_out;
		} else if (before(ack, l->ack_out) || (l->phase_in == PHASE_TO_LOCAL && before(l->ack_out, l->bound_in))) {
			win = later(ack + win, l->ack_out) - l->ack_out; /* the same right edge */
			ack = l->ack_out;
		}
		l->ack_out = ack;
		l->win_out = win;
	}
	e->seq = seq;
	e->ack = ack;
	e->win = window_field(win, l->wscale_out);
	if (s->flags & TH_ACK)
		l->edge_out = later(l->edge_out, ack + ((__u32)e->win << l->wscale_out));
	point_at_urgent(e, s, l->shim_out);
	e->sack_add = l->shim_in;
	e->sack_lo = s->ack - FAR;
	e->sack_hi = s->ack + FAR;
	e->tsecr = s->tsecr;
	if (s->has_ts) {
		if (l->flags & LEG_CLOCK && !(l->flags & LEG_FOREIGN))
			l->shim_ts = l->tsval_out - s->tsval;
		l->flags &= ~LEG_CLOCK;
		if (l->flags & LEG_FOREIGN)
			e->tsval = foreign_tsval(l, s->tsval);
		else
			e->tsval = our_tsval(l, s->tsval, 1, &l->shim_ts);
	}
	return 1;
}

/* ---- the switches: each step under the lock of the leg named first ---- */

/* Has the sender been promised more than the receiver has room for? What is under way beyond that is lost with a switch, and
 * only a timeout brings it back. `out`: the end of what was given to the receiver's socket, with all in hand for it. */
INLINE int overpromised(const struct leg *from, const struct half *h, __u32 out, const struct leg *to)
{
	return h->limit != LIMIT_KEEP && after(edge_promised(from) - (from->irs + 1 + h->consumed) + out, to->edge_in);
}

/* What is kept is acknowledged from the freeze on, as all below a bound: the socket must have all of it, and has if it says so,
 * or if it was read. */
INLINE int has_gaps(const struct leg *from, const struct half *h)
{
	return h->limit == LIMIT_KEEP && from->ack_local != from->max_in && from->irs + 1 + h->consumed != from->max_in;
}

/* Is the end of a stream kept, and that of the other might pass by? The flow would be over then, with what is kept unread. */
INLINE int keeps_end(const struct leg *from, const struct half *h, const struct half *other)
{
	return h->limit == LIMIT_KEEP && other->limit == LIMIT_NONE && from->flags & LEG_FIN_IN;
}

/* Is nothing left that may be forwarded? */
INLINE int all_has_come(const struct leg *from, const struct half *h)
{
	return h->limit <= LIMIT_MAX &&
	       (from->flags & LEG_FIN_IN || from->max_in - (from->irs + 1 + h->consumed) >= h->limit);
}

/* Splice, direction from -> to, step 1. `out`: the end of what was given to the other socket, with all in hand for it.
 * Returns the bytes still to be read, a FIN counting one. */
INLINE __u32 freeze_in(struct leg *from, const struct half *h, __u32 out, __u32 *bound_out, __u32 hold)
{
	__u32 taken = from->irs + 1 + h->consumed;
	__u32 pending = h->limit == LIMIT_KEEP ? 0 : from->max_in - taken;

	from->bound_in = from->max_in;
	from->verbatim = taken;
	*bound_out = out + pending;
	from->seq_off = *bound_out - from->bound_in;
	from->phase_in = PHASE_TO_FWD;
	from->held_in = from->bound_in;
	from->held = 0;
	from->limit_in = h->limit == LIMIT_KEEP ? from->bound_in : taken + h->limit;
	from->flags &= ~(LEG_HOLD | LEG_TRIGGER | LEG_BYPASSED | LEG_PROBE);
	if (hold)
		from->flags |= LEG_HOLD;
	if (h->limit != LIMIT_NONE)
		from->flags |= LEG_TRIGGER;
	return pending;
}

/* Step 2; tsval: the sender's last. Returns 1 when nothing was left to drain. */
INLINE int freeze_out(struct leg *to, __u32 bound_out, __u32 tsval)
{
	to->bound_out = bound_out;
	to->ts_from_peer = to->tsval_out - tsval;
	to->phase_out = before(to->ack_in, bound_out) ? PHASE_TO_FWD : PHASE_FWD;
	return to->phase_out == PHASE_FWD;
}

/* Step 3, if step 2 returned 1, and what was beyond a limit has not taken it back meanwhile. */
INLINE void freeze_done(struct leg *from)
{
	if (from->phase_in == PHASE_TO_FWD)
		forwards(from);
}

/* Unsplice, direction from -> to, step 1: a splice that has not drained is taken back whole. The sender was told of nothing
 * beyond its bound, so it still has that; the receiver may have it as well, and may say so (ahead_of_socket). */
INLINE void stop_drain(struct leg *to)
{
	if (to->phase_out != PHASE_TO_FWD)
		return;
	to->phase_out = PHASE_LOCAL;
	to->bound_out = to->ack_in;
	if (after(to->max_out, to->local_out))
		to->flags |= LEG_AHEAD;
}

/* Step 2: bytes from `at` on belong to the socket again; `at` not before max_in. Returns whether it was forwarded before. */
INLINE int unsplice_in(struct leg *from, const struct leg *to, __u32 at)
{
	from->flags &= ~LEG_HOLD;
	if (from->phase_in == PHASE_TO_FWD) /* what has drained before step 1 has drained */
		from->phase_in = *(volatile __u8 *)&to->phase_out == PHASE_FWD ? PHASE_FWD : PHASE_LOCAL;
	if (from->phase_in != PHASE_FWD)
		return 0;
	from->flags |= LEG_BYPASSED;
	/* the socket's window moves along with its numbers; it had read all up to the old bound */
	from->win_local = later(edge_local(from), from->bound_in) - from->bound_in;
	from->ack_local = at;
	from->shim_in += at - from->bound_in;
	from->bound_in = at;
	from->win_out = later(edge_local(from), from->ack_out) - from->ack_out;
	from->phase_in = before(from->ack_out, at) ? PHASE_TO_LOCAL : PHASE_LOCAL;
	return 1;
}

/* Step 3, if it was. `at`: the same position in the receiver's space. Returns 1 when all of it was acknowledged already. */
INLINE int unsplice_out(struct leg *to, __u32 at)
{
	to->shim_out += at - to->bound_out;
	to->bound_out = at;
	to->local_out = at;
	to->max_out = later(to->max_out, at);
	to->phase_out = before(to->ack_in, at) ? PHASE_TO_LOCAL : PHASE_LOCAL;
	return to->phase_out == PHASE_LOCAL;
}

/* Step 4, if step 3 returned 1. */
INLINE void unsplice_done(struct leg *from)
{
	if (from->phase_in == PHASE_TO_LOCAL) {
		from->phase_in = PHASE_LOCAL;
		/* ack_out stays below the bound until the next segment; nothing below it can come any more but copies */
	}
}

#endif
