/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What happens to a segment from a host, outside of forwarding mode: its data by phase_in, its acknowledgement by phase_out. As
 * in switch.h, each function works on one leg, under its lock. The table is at slow_ingress(). */
#ifndef LONGSPLICE_HOST_H
#define LONGSPLICE_HOST_H

#include "switch.h"

/* ---- step 1: under the lock of the leg where it arrived ---- */

/* The data of a segment, by l's phase_in: who gets it, and up to where. Each function returns the end of what the socket gets:
 * [seq, end). end: that of the segment, its FIN included. */

INLINE __u32 data_to_socket(struct leg *l, struct plan *p, __u32 end, int pure)
{
	p->local = !pure;
	/* The sequence number of a bare acknowledgement may be behind lost data or a lost FIN. It does not mean that they have
	 * arrived. */
	if (!pure)
		advance_in(l, end);
	return end;
}

/* What is_to_be_held(): the part below the bound of a drain is the socket's nevertheless. */
INLINE __u32 data_held(struct leg *l, const struct seg *s, struct plan *p, __u32 end)
{
	__u32 local_end = s->seq;

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
	return local_end;
}

INLINE __u32 data_forwarded(struct leg *l, const struct seg *s, struct plan *p, __u32 end)
{
	p->fwd = 1;
	advance_in(l, end);
	forwards(l);
	return s->seq;
}

INLINE __u32 data_in_drain(struct leg *l, const struct seg *s, struct plan *p, __u32 end)
{
	p->local = before(s->seq, l->bound_in);
	p->fwd = after(end, l->bound_in);
	/* A segment across the bound is forwarded whole, since the socket relays the bytes below the bound unchanged. If the proxy
	 * may have changed them, or the socket lacks some of them, the host has to retransmit from the bound on. */
	if (p->local && (before(s->seq, l->verbatim) || before(l->ack_local, l->bound_in)))
		p->fwd = 0;
	if (p->fwd && is_beyond(l, s)) {
		/* Forward up to the limit and let the host retransmit the rest, rather than give up the drain. */
		p->fwd = s->len && before(s->seq, l->limit_in);
		p->f.keep = cut_at(s, earlier(s->seq + s->len, l->limit_in));
		p->f.flags &= ~TH_FIN;
		p->fwd_end = s->seq + p->f.keep;
	}
	if (p->fwd)
		advance_in(l, p->fwd_end);
	else if (!p->local)
		p->dropped = V_BEYOND_LIMIT;
	return earlier(end, l->bound_in);
}

INLINE __u32 data_in_unsplice(struct leg *l, const struct seg *s, struct plan *p, __u32 end)
{
	__u32 local_end;

	p->fwd = before(s->seq, l->bound_in) && before(l->ack_out, l->bound_in);
	p->local = after(end, l->bound_in);
	local_end = p->local ? end : s->seq;
	if (p->fwd && p->local) {
		/* Forward the part below the bound. The socket gets the whole segment: that part is old to it. */
		p->f.keep = cut_at(s, l->bound_in);
		p->f.flags &= ~TH_FIN;
		p->fwd_end = s->seq + p->f.keep;
	}
	advance_in(l, end);
	if (p->fwd || p->local)
		return local_end;
	p->local = 1; /* old data: the socket answers with its acknowledgement */
	return end;
}

/* The acknowledgement of a segment, by l's phase_out: for whom it is worth a copy without data. news: it acknowledges something,
 * or the segment is nothing but an acknowledgement. */
INLINE void plan_ack(struct leg *l, const struct seg *s, struct plan *p, int news)
{
	int sent;

	p->ack = s->ack;
	p->f.sack_lo = s->ack - FAR;
	p->f.sack_hi = s->ack + FAR;
	switch (l->phase_out) {
	case PHASE_LOCAL:
		p->local |= news;
		break;
	case PHASE_TO_FWD:
		p->local |= news;
		/* Bytes below the bound may have reached the host in a copy across the bound. Until the socket has sent them
		 * as well, the drain may be taken back, so nothing beyond the bound is acknowledged to the sender. */
		sent = !before(l->local_out, l->bound_out);
		p->ack_valid = sent && !before(s->ack, l->bound_out);
		p->fwd |= p->ack_valid && news;
		p->f.sack_lo = l->bound_out;
		if (sent && !before(l->ack_in, l->bound_out)) {
			l->phase_out = PHASE_FWD;
			p->drained = 1;
		}
		break;
	case PHASE_FWD:
		p->ack_valid = 1;
		p->fwd |= news;
		break;
	case PHASE_TO_LOCAL:
		p->local |= !before(s->ack, l->bound_out) && news;
		p->ack_valid = 1;
		p->ack = earlier(s->ack, l->bound_out);
		p->f.sack_hi = l->bound_out;
		p->fwd |= news;
		if (!before(l->ack_in, l->bound_out)) {
			l->phase_out = PHASE_LOCAL;
			p->returned = 1;
			p->fwd = 1;
		}
		break;
	}
}

/* Has the socket just caught up with what was forwarded past it? Only when it has seen everything acknowledged. If the flow were
 * spliced and unspliced before, the new shim would place the socket's retransmissions where other bytes belong. */
INLINE int catches_up(struct leg *l, const struct seg *s)
{
	if (!(l->flags & LEG_AHEAD) || l->phase_out != PHASE_LOCAL || l->local_out != l->max_out || !(s->flags & TH_ACK) ||
	    s->ack != l->local_out)
		return 0;
	l->flags &= ~LEG_AHEAD;
	return 1;
}

/* Decide which bytes go where, and whether the acknowledgement alone is worth a copy. Returns 0 if neither copy is sent. */
INLINE int host_segment(struct leg *l, const struct seg *s, struct plan *p)
{
	__u32 fin = !!(s->flags & TH_FIN);
	__u32 end = s->seq + s->len + fin;
	__u32 old_ack = l->ack_in, come = l->max_in, local_end;
	int pure = end == s->seq;
	int data; /* the socket's copy carries data or a FIN */
	int news;

	p->local = p->fwd = p->fwd_data = p->ack_valid = p->drained = p->returned = 0;
	p->hold = HOLD_NOT;
	p->lose_local = p->lose_fwd = 0;
	p->dropped = refuses(l, s);
	if (p->dropped && !is_given_up(l) && (l->phase_in != PHASE_LOCAL || ahead_of_socket(l)))
		return 0;
	if (p->dropped || is_given_up(l)) {
		/* In control mode the socket handles an unacceptable segment, and may answer it. If our side was reset,
		 * perhaps in a switch, and the host has not accepted that, the kernel has to reset it again. */
		if (!p->dropped)
			learn_from_host(l, s, p);
		p->local = 1;
		p->l.keep = s->len;
		p->l.flags = s->flags;
		edit_for_local(l, s, p, 1);
		return 1;
	}
	note_excess(l, s);
	learn_from_host(l, s, p);
	news = pure || after(l->ack_in, old_ack);

	p->f.keep = p->l.keep = s->len;
	p->f.flags = p->l.flags = s->flags;
	p->fwd_end = end;
	if (pure || l->phase_in == PHASE_LOCAL)
		local_end = data_to_socket(l, p, end, pure);
	else if (is_to_be_held(l, s, end))
		local_end = data_held(l, s, p, end);
	else if (l->phase_in == PHASE_FWD)
		local_end = data_forwarded(l, s, p, end);
	else if (l->phase_in == PHASE_TO_FWD)
		local_end = data_in_drain(l, s, p, end);
	else
		local_end = data_in_unsplice(l, s, p, end);
	p->fwd_data = p->fwd;
	plan_marks(l, s, p, come, local_end);
	if (p->local && local_end != end) {
		p->l.keep = cut_at(s, local_end);
		p->l.flags &= ~TH_FIN;
	}
	if (fin && end == l->max_in) /* not if the FIN was held or cut off: it arrives again */
		l->flags |= LEG_FIN_IN;
	data = p->local;
	if (catches_up(l, s))
		p->local = news = 1;

	edit_for_local(l, s, p, data);
	if (!data) {
		p->l.keep = 0;
		p->l.flags &= ~TH_FIN;
	}
	p->f.tsval = s->tsval;
	p->f.tsecr = s->tsecr - l->ts_from_peer;
	p->f.seq = s->seq + l->seq_off;
	plan_ack(l, s, p, news);
	if (p->fwd && !p->fwd_data) {
		p->f.keep = 0;
		p->f.flags &= ~TH_FIN;
	}
	/* Keep the urgent pointer only in a copy that carries the urgent byte. Until that byte arrives, it may still get another
	 * owner. If the other host gets all data, its copy keeps the pointer in any case. */
	if (after(urgent_end(s), local_end))
		p->l.flags &= ~TH_URG;
	if ((l->phase_in != PHASE_FWD || l->flags & LEG_TRIGGER) && (!p->fwd_data || after(urgent_end(s), p->fwd_end)))
		p->f.flags &= ~TH_URG;
	point_at_urgent(&p->l, s, -l->shim_in);
	return p->local || p->fwd;
}

/* Does the socket get the segment unchanged? After step 1. */
INLINE int is_plain(const struct leg *l, const struct seg *s, const struct plan *p)
{
	return untouched(l) && !p->returned && p->l.seq == s->seq && p->l.ack == s->ack && p->l.flags == s->flags;
}

/* ---- a segment from a host, step 2: under the lock of the other leg ---- */

/* Complete the forwarded copy for the leg where it leaves, and record what it tells that leg's host. */
INLINE void forward_segment(struct leg *o, const struct seg *s, struct plan *p)
{
	struct edit *e = &p->f;
	__u32 ack = o->ack_out, win = o->win_out, shift = e->seq - s->seq;
	int again = 1;

	if (p->drained && o->phase_in == PHASE_TO_FWD) /* not if it was taken back meanwhile */
		forwards(o);
	if (p->ack_valid) {
		__u32 a = p->ack - o->seq_off;

		if (p->returned)
			a = later(a, o->ack_local);
		if (!before(a, ack)) {
			ack = a;
			win = p->win;
			/* All data for the other host was sent. What follows, beyond bound or limit, is for the local socket. */
			if (o->phase_in == PHASE_TO_LOCAL)
				win = later(edge_local(o), ack) - ack;
			else if (all_passed(o))
				win = o->limit_in + room_local(o) - ack;
		}
		again = ack == o->ack_out && win == o->win_out;
		o->ack_out = ack;
		o->win_out = win;
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
		e->seq = pure_ack_seq(o, again);
	}
	point_at_urgent(e, s, shift);
	e->sack_add = -o->seq_off;
	e->strip_ts = !(o->flags & LEG_TS);
	e->strip_sack = !(o->flags & LEG_SACK) || !p->ack_valid;
	join_marks(o, p);
	if (s->has_ts)
		e->tsval = our_tsval(o, s->tsval, p->in_order_ts, &o->ts_from_peer);
	if (s->again) /* a held segment: later ones of its host may have been forwarded before it */
		e->tsval = later(e->tsval, o->tsval_out);
}

#endif
