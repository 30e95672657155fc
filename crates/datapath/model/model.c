/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The decision logic of the data path (switch.h, path.h, ecn.h) compiled for user space, so that a simulator can drive it: one
 * flow, one processor; and a second one, on which a segment comes in before the first takes one of its locks. What surrounds
 * that logic here (ingress, model_egress, model_switch) follows the entries of splice.bpf.c without look-ups and packets;
 * keep them alike. */
#include <linux/bpf.h>
#include <stdlib.h>
#include <string.h>

static void before_lock(void);
static inline void bpf_spin_lock(struct bpf_spin_lock *l) { (void)l, before_lock(); }
static inline void bpf_spin_unlock(struct bpf_spin_lock *l) { (void)l; }

#include "path.h"
#include "place.h"

struct model {
	struct leg leg[2];
	struct path path[2]; /* where packets of leg i's host come in */
	__u64 now;           /* ns */
	int closed;          /* the sockets are gone */
	struct meanwhile *meanwhile;
};

/* Mirrored in src/model.rs. */
struct model_start {
	__u32 irs, iss, edge_in, edge_out, tsval_in, tsval_out, flags;
	__u8 wscale_in, wscale_out;
};

struct model_out {
	__u8 local, fwd; /* copies sent */
	__u8 plain;      /* the local copy is the segment as it came */
	__u8 events;     /* 1 << enum event_kind; 1: the segment is held */
	__u32 dropped;   /* enum verdict, if neither is sent */
	struct edit l, f;
};

struct model_switch {
	__u32 op, result, hold, trigger, fit, spare;
	__u32 consumed[2], produced[2], leftover[2], limit[2];
	__u32 pending[2], start[2], fin[2], flags[2], phase[2];
	__u64 end[2];
};

/* What the second processor does. */
struct meanwhile {
	__u32 locks; /* that the first one takes before; 0: it has come */
	__u32 leg;
	struct seg s;
	struct model_out out;
};

struct model *model_new(const struct model_start *s)
{
	struct model *m = calloc(1, sizeof(*m));

	if (!m)
		abort();
	for (int i = 0; i < 2; i++, s++) {
		struct leg *l = &m->leg[i];

		l->irs = s->irs;
		l->iss = s->iss;
		l->flags = s->flags | LEG_TRACKED;
		l->wscale_in = s->wscale_in;
		l->wscale_out = s->wscale_out;
		l->max_in = l->ack_out = l->ack_local = s->irs + 1;
		l->max_out = l->local_out = l->ack_in = s->iss + 1;
		l->edge_in = s->edge_in;
		l->edge_out = s->edge_out;
		l->win_out = l->win_local = s->edge_out - l->ack_out;
		l->tsval_in = s->tsval_in;
		l->tsval_out = s->tsval_out;
	}
	return m;
}

void model_free(struct model *m) { free(m); }

void model_look(const struct model *m, int i, struct leg *to) { *to = m->leg[i]; }
__u64 model_leg_size(void) { return sizeof(struct leg); }

/* The clock stands still in between. */
void model_time(struct model *m, __u64 now) { m->now = now; }

void model_close(struct model *m) { m->closed = 1; }

static void unsplice_legs(struct model *m)
{
	wake_both(&m->leg[0], &m->leg[1], &m->path[0], &m->path[1], m->now);
	unsplice_direction(&m->leg[0], &m->leg[1]);
	unsplice_direction(&m->leg[1], &m->leg[0]);
}

/* Returns 0 when the leg's record must decide. */
static int fast(struct model *m, int i, const struct seg *s, struct model_out *out)
{
	struct path *p = &m->path[i], *rev = &m->path[!i];
	union path_word w = p->word;
	int rst = s->flags & TH_RST;
	struct plan plan = {};
	enum step step;

	if (!(w.flags & PATH_SPLICED))
		return 0;
	if (w.flags & PATH_DEAD && m->closed && !rst) {
		out->local = out->plain = 1;
		return 1;
	}
	out->dropped = rst ? 0 : path_refuses(p, w, rev, s);
	if (out->dropped)
		return 1;
	if (!rst && path_is_beyond(w, &m->leg[i], s)) {
		stop_path(p);
		return 0;
	}
	step = path_step(p, rev, w, &m->leg[i], s, 1, seen_at(m->now), &plan);
	out->events |= plan.events;
	out->dropped = plan.dropped;
	if (step == STEP_ASK)
		path_ask(p, rev, &plan.f);
	out->f = plan.f;
	out->fwd = step == STEP_ON || step == STEP_ASK;
	return step != STEP_RECORD;
}

static void ingress(struct model *m, int i, const struct seg *s, struct model_out *out)
{
	struct leg *l = &m->leg[i], *o = &m->leg[!i];
	struct plan p;
	int woken = 0, keep_going;
	__u32 flags;

again:
	memset(out, 0, sizeof(*out));
	memset(&p, 0, sizeof(p));
	if (fast(m, i, s, out))
		return;
	if (l->flags & LEG_SPLICED) {
		wake_both(l, o, &m->path[i], &m->path[!i], m->now);
		woken = 1;
	}
	if (is_half_frozen(l, o)) {
		out->dropped = V_STALE_CPU;
		return;
	}
	if (!refuses(l, s))
		heard(l, s, m->now);
	if (takes_back(l, s) && !(s->flags & TH_RST)) {
		if (woken)
			unsplice_legs(m);
		else
			unsplice_direction(l, o);
		out->events |= 1 << EVENT_TRIGGERED;
	}
	if (s->flags & TH_RST) {
		int control = l->phase_in == PHASE_LOCAL && l->phase_out == PHASE_LOCAL;
		int in_order = rst_in_order(l, s);

		if (control) {
			reset_for_local(l, s, &p);
			out->local = 1;
			out->l = p.l;
			return;
		}
		if (is_over(l) || (!in_order && !unproven_reset(l, s, &p))) {
			out->dropped = V_BAD_RST;
			return;
		}
		if (!in_order) {
			ask_other(o, &p);
			out->local = p.local;
			out->fwd = p.fwd;
			out->l = p.l;
			out->f = p.f;
			return;
		}
		bpf_spin_lock(&l->lock);
		if (l->flags & LEG_SPLICED)
			goto again;
		host_reset(l, s, &p);
		bpf_spin_lock(&o->lock);
		forward_reset(o, &p);
		out->events |= 1 << EVENT_RESET;
		out->local = out->fwd = 1;
		out->l = p.l;
		out->f = p.f;
		return;
	}
	bpf_spin_lock(&l->lock);
	if (l->flags & LEG_SPLICED || takes_back(l, s) || is_half_frozen(l, o))
		goto again;
	flags = l->flags;
	keep_going = host_segment(l, s, &p);
	out->events |= p.hold;
	if (!keep_going) {
		out->dropped = p.hold ? V_HELD : p.dropped;
		return;
	}
	if ((flags ^ l->flags) & LEG_HOLD && p.fwd_data)
		out->events |= 1 << EVENT_FORWARDING;
	if (is_plain(l, s, &p)) {
		out->local = out->plain = !p.lose_local;
		out->dropped = V_CE_DROPPED;
		return;
	}
	if (p.fwd || p.drained || p.returned) {
		bpf_spin_lock(&o->lock);
		forward_segment(o, s, &p);
		if (p.drained || p.returned) {
			if (o->phase_in == PHASE_FWD && (o->phase_out == PHASE_FWD || o->flags & LEG_HOLD))
				out->events |= 1 << EVENT_FORWARDING;
			if (o->phase_out == PHASE_LOCAL && o->phase_in == PHASE_LOCAL)
				out->events |= 1 << EVENT_CONTROL;
		}
	}
	if (p.fwd_data && all_passed(l)) {
		if (woken)
			unsplice_legs(m);
		out->events |= 1 << EVENT_PASSED;
	}
	if (lose_marked(&p) && !p.local && !p.fwd) {
		out->dropped = V_CE_DROPPED;
		return;
	}
	out->local = p.local || !p.fwd; /* what is not forwarded is passed up */
	out->fwd = p.fwd;
	out->l = p.l;
	out->f = p.f;
}

/* Where the first processor is. */
static __thread struct model *busy;

static void before_lock(void)
{
	struct model *m = busy;

	if (!m || !m->meanwhile || !m->meanwhile->locks || --m->meanwhile->locks)
		return;
	busy = NULL;
	ingress(m, m->meanwhile->leg, &m->meanwhile->s, &m->meanwhile->out);
	busy = m;
}

void model_meanwhile(struct model *m, struct meanwhile *w) { m->meanwhile = w; }

void model_ingress(struct model *m, int i, const struct seg *s, struct model_out *out)
{
	busy = m;
	ingress(m, i, s, out);
	busy = NULL;
}

int model_egress(struct model *m, int i, const struct seg *s, struct edit *e)
{
	struct leg *l = &m->leg[i], *o = &m->leg[!i];
	struct plan p;
	__u32 room = 0;

	memset(&p, 0, sizeof(p));
	if (m->path[i].word.flags & PATH_SPLICED && m->path[i].word.flags & PATH_DEAD && s->flags & TH_RST) {
		*e = (struct edit){ .seq = s->seq, .ack = s->ack, .keep = s->len, .win = s->win, .flags = s->flags };
		return 1;
	}
	if (m->path[i].word.flags & PATH_SPLICED)
		return local_segment(l, s, &p, 0), 0;
	if (l->phase_in == PHASE_TO_FWD)
		room = o->edge_in - l->seq_off;
	if (!local_segment(l, s, &p, room))
		return 0;
	if (gives_up_both(l, &p))
		o->flags |= LEG_RESET;
	*e = p.l;
	return 1;
}

static void look(const struct model *m, struct model_switch *g)
{
	for (int i = 0; i < 2; i++) {
		const struct leg *l = &m->leg[i];
		union path_word w = m->path[i].word;

		g->phase[i] = l->phase_in;
		g->flags[i] = l->flags;
		g->start[i] = l->bound_in - l->irs - 1;
		g->end[i] = l->in64;
		if (l->flags & LEG_SPLICED)
			g->end[i] += path_passed(l, w);
	}
}

void model_switch(struct model *m, struct model_switch *g)
{
	struct switch_args a = { .op = g->op, .hold = g->hold, .fit = g->fit, .trigger = g->trigger };

	a.a.consumed = g->consumed[0], a.b.consumed = g->consumed[1];
	a.a.produced = g->produced[0], a.b.produced = g->produced[1];
	a.a.leftover = g->leftover[0], a.b.leftover = g->leftover[1];
	a.a.limit = g->limit[0], a.b.limit = g->limit[1];
	g->result = SWITCH_OK;
	busy = m;
	switch (g->op) {
	case OP_FREEZE:
		g->result = freeze(&a, &m->leg[0], &m->leg[1], m->now);
		break;
	case OP_COMMIT:
		g->result = may_commit(&m->leg[0], &m->leg[1]);
		if (g->result == SWITCH_OK)
			commit_legs(&a, &m->leg[0], &m->leg[1], &m->path[0], &m->path[1], 0, 0);
		break;
	case OP_UNSPLICE:
		unsplice_legs(m);
		was_passed(&a.a, &m->leg[0]);
		was_passed(&a.b, &m->leg[1]);
		break;
	}
	busy = NULL;
	g->pending[0] = a.a.pending, g->pending[1] = a.b.pending;
	g->fin[0] = a.a.fin, g->fin[1] = a.b.fin;
	look(m, g);
}

/* Flags of the path entries, for the simulator's engine. */
__u32 model_path_flags(const struct model *m, int i) { return m->path[i].word.flags; }

/* Where the table has a way of a key's, of WAYS: page << 32 | slot. */
__u64 model_place(const struct tuple *t, int v6, __u64 seed, __u32 pages, __u32 way)
{
	struct tuple4 k = key4(t);
	__u64 hash = v6 ? hash6(seed, t) : hash4(seed, &k);
	__u32 slots = v6 ? SLOTS6 : SLOTS4;

	return (__u64)page_of(hash, pages) << 32 | at_way(home_of(hash, slots), slots, way);
}
