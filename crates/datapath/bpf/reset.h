/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Resets outside of forwarding mode: whether an RST is genuine, and what the socket and the other host get to see of it. As in
 * switch.h, each function works on one leg, under its lock. */
#ifndef LONGSPLICE_RESET_H
#define LONGSPLICE_RESET_H

#include "switch.h"

/* Is the RST exactly in order? Only then does it reset the connection (RFC 5961, 3.2). */
INLINE int rst_in_order(const struct leg *l, const struct seg *s)
{
	return s->seq == l->ack_out || s->seq == l->max_in;
}

/* Is the RST late, but possibly genuine? If the window has shrunk below what Linux had sent, it resets at the edge of the window
 * that it knows (tcp_acceptable_seq()), and a close ignores acknowledgements that arrive meanwhile. The receiver is beyond such a
 * reset by then, and no other one follows. It cannot be older than the largest window that the host may have been given. */
INLINE int is_late(const struct leg *l, __u32 seq)
{
	return before(seq, l->ack_out) && l->ack_out - seq <= (__u32)65535 << l->wscale_out;
}

/* The number of an RST in order, as the local socket sees it. It has to be what the socket expects. The host need not answer a
 * challenge: its port may be in use again, or a firewall on the way may have forgotten the connection. The socket may lack the
 * bytes before the RST, and may not have acknowledged all that it has. While a process works on it, the RST waits behind what
 * came before; if nothing is missing, `seq` is right then. */
INLINE __u32 expected_by_local(const struct leg *l, const struct seg *s, __u32 seq)
{
	return s->socket_known ? s->socket_next : later(seq, l->ack_local) - l->shim_in;
}

/* Fill in the copy of an RST for the local socket, which decides about it in control mode. An unsplice
 * shrinks the window, and the host may have used the larger one. So an RST beyond the current edge moves to just before it,
 * where the socket challenges the host (RFC 5961, 3.2). The edge itself would be in order for a socket that has received
 * everything up to there. Late RSTs move there, too. */
INLINE void reset_for_local(struct leg *l, const struct seg *s, struct plan *p)
{
	/* A socket that is passed by has an edge of long ago, which the RST need not be compared with. */
	__u32 edge = edge_local(l), seq = s->seq;
	int beyond = l->phase_in == PHASE_FWD || after(seq, edge);

	edit_for_local(l, s, p, 1);
	p->l.keep = s->len;
	p->l.flags = s->flags;
	if (rst_in_order(l, s)) {
		l->flags |= LEG_RESET | LEG_RESET_IN;
		p->l.seq = expected_by_local(l, s, beyond ? l->ack_local : seq);
		return;
	}
	if (((beyond && !after(seq, l->edge_out)) || is_late(l, seq)) && edge - l->ack_local > 1)
		seq = edge - 1;
	p->l.seq = seq - l->shim_in;
}

/* Plan for an RST that is not in order, while the flow is switching. It changes no other state. If it is in the window or
 * late, its sender is challenged (RFC 5961, 3.2): by the socket, whose challenge leaves like its other segments, or by the
 * other host, if the socket is muted or the number belongs to forwarded bytes. After an unsplice, a challenge from the other
 * host would not get through, so the socket probes then (LEG_PROBE). Returns 0 if the RST is neither. */
INLINE int unproven_reset(struct leg *l, const struct seg *s, struct plan *p)
{
	if (after(s->seq, l->edge_out) || (before(s->seq, l->ack_out) && !is_late(l, s->seq)))
		return 0;
	reset_for_local(l, s, p);
	l->flags |= LEG_PROBE;
	p->fwd = (l->phase_in == PHASE_FWD && l->phase_out == PHASE_FWD) ||
		 (l->phase_in == PHASE_TO_LOCAL && before(s->seq, l->bound_in));
	p->local = !p->fwd;
	p->l.keep = p->f.keep = 0; /* drop its text, if it has any: nobody reads it (RFC 9293, 3.10.7.4) */
	p->f.flags = s->flags;
	p->f.seq = s->seq + l->seq_off;
	p->f.win = p->f.urg = 0;
	p->f.strip_ts = p->f.strip_sack = p->f.strip_ecn = 1;
	p->f.stamp = 0;
	return 1;
}

/* Plan a challenge ACK to the leg's host by the numbers of its record. */
INLINE void challenge_by_record(const struct leg *l, struct edit *e)
{
	e->seq = pure_ack_seq(l, 1);
	e->ack = l->ack_out;
	e->win = window_field(l->win_out, l->wscale_out);
	e->urg = 0;
	e->flags = TH_ACK;
	e->keep = e->stamp = 0;
	e->strip_ts = e->strip_sack = e->strip_ecn = 1;
	if (l->flags & LEG_TS)
		stamp(e, l->tsval_out, l->tsval_in);
}

/* The rest of unproven_reset(), for the leg where the copy leaves. The other host would ignore an RST outside of its window, and
 * after forwarding mode its edge is not known (edge_in is an upper limit then). Old hosts accept any RST within. So unless the
 * RST is in order for it, a keep-alive (RFC 9293, 3.8.4) takes its place, and the host answers that. */
INLINE void ask_other(const struct leg *o, struct plan *p)
{
	if (p->f.seq != o->ack_in) {
		p->f.seq = o->ack_in - 1;
		p->f.flags = TH_ACK;
		if (o->flags & LEG_TS)
			stamp(&p->f, o->tsval_out, o->tsval_in);
	}
	p->f.ack = o->ack_out;
}

/* Does the host know of the reset? Otherwise it may have been ahead of the one that was forwarded, and have ignored it, or none
 * was. */
INLINE int knows_of_reset(const struct leg *l)
{
	return l->flags & LEG_RESET && l->flags & (LEG_RESET_IN | LEG_TOLD);
}

/* Plan for an RST in order while the flow is switching: it goes to the socket, which may be gone, and to the other host if all
 * data before it was forwarded. Otherwise a socket may hold some of that data, or the process, and a reset would overtake it:
 * user space passes the data on, and then resets the other host. drained: the other host has acknowledged all that was sent by
 * its socket. Under the lock of the leg where it arrived ... */
INLINE void host_reset(struct leg *l, const struct seg *s, struct plan *p, int drained)
{
	l->flags |= LEG_RESET | LEG_RESET_IN;
	edit_for_local(l, s, p, 0);
	if (l->phase_in != PHASE_FWD)
		p->l.seq = expected_by_local(l, s, l->phase_in == PHASE_TO_FWD ? earlier(s->seq, l->bound_in) : s->seq);
	p->l.keep = p->f.keep = 0;
	p->l.flags = p->f.flags = s->flags;
	p->local = 1;
	/* an RST with text (RFC 9293, 3.10.7.4) is not forwarded */
	p->fwd = drained && !s->len && l->phase_in == PHASE_FWD && !(l->flags & LEG_HOLD) && !keeps_data(l);
	if (!p->fwd && l->phase_out == PHASE_TO_LOCAL) /* the host acknowledges nothing any more */
		l->phase_out = PHASE_LOCAL;
	p->f.tsval = s->tsval;
	p->f.tsecr = s->tsecr;
	p->f.sack_add = 0;
	p->f.strip_ts = p->f.strip_sack = p->f.strip_ecn = 1;
}

/* ... and under the lock of the other leg. */
INLINE void forward_reset(struct leg *o, struct plan *p)
{
	if (!p->fwd) {
		unsplice_done(o);
		return;
	}
	p->f.seq = o->ack_in; /* exactly what it expects (RFC 5961, 3.2) */
	p->f.ack = o->ack_out;
	p->f.win = p->f.urg = 0;
	o->flags |= LEG_RESET | (o->ack_in == o->max_out ? LEG_TOLD : 0);
}

#endif
