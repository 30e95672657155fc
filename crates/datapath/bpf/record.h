/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Segments outside of forwarding mode: the steps of switch.h in order, over the records of both legs, each under its own lock.
 * As in step.h, callers do the look-ups and handle the packets. */
#ifndef LONGSPLICE_RECORD_H
#define LONGSPLICE_RECORD_H

#include "host.h"
#include "path.h"
#include "reset.h"

/* Is a freeze under way on another processor, with l frozen and o not yet? */
INLINE int is_half_frozen(const struct leg *l, const struct leg *o)
{
	return l->phase_in == PHASE_TO_FWD && *(volatile __u8 *)&o->phase_out == PHASE_LOCAL;
}

/* Has the record to be woken up before it can be used? p: its path entry. Under the lock, since a commit marks the record and
 * brings the entry into force under it: seen between the two, it would look like one whose entry was stopped. */
INLINE int is_asleep(struct leg *l, const struct path *p)
{
	int asleep;

	bpf_spin_lock(&l->lock);
	asleep = l->flags & LEG_SPLICED && !(*(volatile __u16 *)&p->word.flags & PATH_SPLICED);
	bpf_spin_unlock(&l->lock);
	return asleep;
}

/* Would both copies have to be cut? Then only the socket gets one, and the other host depends on a later segment. */
INLINE int is_straddle(const struct seg *s, const struct plan *p)
{
	return p->local && p->fwd && p->l.keep < s->len && p->f.keep < s->len;
}

INLINE int in_control(const struct leg *l)
{
	return l->phase_in == PHASE_LOCAL && l->phase_out == PHASE_LOCAL;
}

/* The step of an RST outside of forwarding mode. o: the other leg, or NULL. STEP_ASK: the RST is not proven, and goes to the
 * socket or the other host, which challenges its sender. */
static __always_inline enum step record_reset(struct leg *l, struct leg *o, const struct seg *s, struct plan *p)
{
	int known;

	p->local = p->fwd = p->events = 0;
	p->dropped = V_BAD_RST;
	if (in_control(l)) { /* the socket decides */
		bpf_spin_lock(&l->lock);
		reset_for_local(l, s, p);
		bpf_spin_unlock(&l->lock);
		p->local = 1;
		return STEP_ON;
	}
	if (is_over(l))
		return STEP_DROP;
	if (!rst_in_order(l, s)) {
		bpf_spin_lock(&l->lock);
		known = unproven_reset(l, s, p);
		bpf_spin_unlock(&l->lock);
		if (!known)
			return STEP_DROP;
		if (p->fwd && o)
			ask_other(o, p);
		return STEP_ASK;
	}
	if (!o) {
		p->dropped = V_NO_PEER;
		return STEP_DROP;
	}
	bpf_spin_lock(&l->lock);
	if (l->flags & LEG_SPLICED) { /* committed since the look-up */
		bpf_spin_unlock(&l->lock);
		return STEP_RECORD;
	}
	host_reset(l, s, p, *(volatile __u8 *)&o->phase_out == PHASE_FWD);
	bpf_spin_unlock(&l->lock);
	bpf_spin_lock(&o->lock);
	forward_reset(o, p);
	bpf_spin_unlock(&o->lock);
	p->events = 1 << EVENT_RESET;
	return STEP_ON;
}

/* The step of a segment from l's host. o: the other leg, or NULL. t, other: their keys. STEP_RECORD: a leg has changed since the
 * look-up; look them up again. */
static __always_inline enum step record_step(struct leg *l, struct leg *o, const struct tuple *t, const struct tuple *other,
					     const struct seg *s, struct plan *p)
{
	__u32 flags, seq_off;
	int go;

	p->events = 0;
	bpf_spin_lock(&l->lock);
	flags = l->flags;
	if (flags & LEG_SPLICED || takes_back(l, s) || (flags & LEG_PAIRED && !is_paired(l, other)) ||
	    (o && is_half_frozen(l, o))) {
		bpf_spin_unlock(&l->lock);
		return STEP_RECORD;
	}
	p->at = l->in64 + (__s32)(s->seq - l->max_in);
	go = host_segment(l, s, p);
	p->plain = is_plain(l, s, p);
	flags ^= l->flags;
	seq_off = l->seq_off;
	bpf_spin_unlock(&l->lock);
	if (flags & LEG_UNTIMED && o) {
		bpf_spin_lock(&o->lock);
		if (is_paired(o, t))
			reached_at_least(o, s->tsval);
		bpf_spin_unlock(&o->lock);
	}
	if (!go)
		return STEP_DROP;
	if (flags & LEG_HOLD && p->fwd_data) /* the last held segment is being forwarded */
		p->events |= 1 << EVENT_FORWARDING;
	if (p->plain)
		return STEP_ON;
	if (p->fwd || p->drained || p->returned) {
		if (!o) {
			p->dropped = V_NO_PEER;
			return STEP_DROP;
		}
		bpf_spin_lock(&o->lock);
		if (!is_paired(o, t)) { /* the peer has left this flow, after everything was acknowledged: the segment is old */
			bpf_spin_unlock(&o->lock);
			p->dropped = V_NO_PEER;
			return STEP_DROP;
		}
		forward_segment(o, s, p);
		p->acked = o->ack_in - seq_off - s->seq;
		if (p->drained || p->returned) {
			if (o->phase_in == PHASE_FWD && (o->phase_out == PHASE_FWD || o->flags & LEG_HOLD))
				p->events |= 1 << EVENT_FORWARDING;
			if (in_control(o))
				p->events |= 1 << EVENT_CONTROL;
		}
		bpf_spin_unlock(&o->lock);
	}
	if (o && l->flags & o->flags & flags & LEG_FIN_ACKED)
		p->events |= 1 << EVENT_CLOSED;
	if (o && p->fwd_data && all_passed(l))
		p->events |= 1 << EVENT_LIMIT_REACHED;
	return STEP_ON;
}

/* Does the socket's RST end both legs? Otherwise the other host would not learn of it, since its segments are forwarded past the
 * sockets. Not if it answers a host that has reset the connection itself: host_reset() has decided about the other one. After
 * local_segment(). */
INLINE int gives_up_both(const struct leg *l, const struct plan *p)
{
	return p->l.flags & TH_RST && (l->flags & (LEG_PAIRED | LEG_RESET_IN)) == LEG_PAIRED && is_switching(l);
}

/* The step of a segment from l's socket. o: the other leg, or NULL. t: l's key. Returns 0 if the socket is muted. */
static __always_inline int record_egress(struct leg *l, struct leg *o, const struct tuple *t, const struct seg *s, struct plan *p)
{
	/* Right edge of the other host's window, in l's in space. Read without o's lock: one word, and only a hint. */
	__u32 room = o && l->phase_in == PHASE_TO_FWD ? *(volatile __u32 *)&o->edge_in - l->seq_off : 0;
	int go;

	bpf_spin_lock(&l->lock);
	go = local_segment(l, s, p, room);
	bpf_spin_unlock(&l->lock);
	if (go && gives_up_both(l, p) && o) {
		bpf_spin_lock(&o->lock); /* it may be joined with another leg at this moment */
		if (is_paired(o, t))
			__sync_fetch_and_or(&o->flags, LEG_RESET);
		bpf_spin_unlock(&o->lock);
	}
	return go;
}

#endif
