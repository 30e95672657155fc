/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The decisions of the data path (step.h, record.h and the files that they include), compiled for user space and driven by a
 * simulator: one flow and one processor, and others that do something before the first takes a lock or changes a word that they
 * share. This file replaces the look-ups and the dispatch of splice.bpf.c. There are no packets. */
#include <linux/bpf.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

/* Where processors see each other's work: before a lock is taken, and before a word is changed atomically. */
static void meet(void);

static __thread int locked; /* locks that are held */

static inline void bpf_spin_lock(struct bpf_spin_lock *l)
{
	do
		meet();
	while (l->val);
	l->val = 1;
	locked++;
}

static inline void bpf_spin_unlock(struct bpf_spin_lock *l)
{
	l->val = 0;
	locked--;
}

#define __sync_fetch_and_add(at, n) (meet(), __sync_fetch_and_add(at, n))
#define __sync_fetch_and_and(at, n) (meet(), __sync_fetch_and_and(at, n))
#define __sync_fetch_and_or(at, n) (meet(), __sync_fetch_and_or(at, n))
#define __sync_val_compare_and_swap(at, was, n) (meet(), __sync_val_compare_and_swap(at, was, n))

#include "place.h"
#include "record.h"
#include "step.h"

struct model {
	struct tuple key[2];
	struct leg leg[2];
	struct path path[2]; /* entry i is for packets from leg i's host */
	__u64 now;           /* ns */
	__u32 generation;    /* of both legs */
	struct meanwhile *meanwhile;
};

/* The initial state of a leg. Mirrored in src/model.rs. */
struct model_start {
	__u32 irs, iss, edge_in, edge_out, tsval_in, tsval_out, flags;
	__u8 wscale_in, wscale_out;
};

/* What happened to a segment. Mirrored there, too. */
struct model_out {
	__u8 local, fwd; /* 1 if this copy was sent */
	__u8 plain;      /* 1 if the local copy is the unchanged segment */
	__u8 back;       /* 1 if `f` was sent to the sender instead */
	__u8 events;     /* 1 << enum event_kind; bit 0: the segment is held */
	__u32 dropped;   /* enum verdict, if nothing was sent */
	struct edit l, f;
};

/* The segment that arrives on the second processor. */
struct meanwhile {
	__u32 meetings; /* how often the first processor calls meet() before; 0 once the segment has arrived */
	__u32 leg;   /* where it arrives */
	struct seg s;
	struct model_out out;
};

static void begin(struct model *m, const struct model_start *s)
{
	for (int i = 0; i < 2; i++, s++) {
		struct leg *l = &m->leg[i];

		m->key[i].lport = i + 1;
		l->iss = s->iss;
		l->flags = s->flags | LEG_TRACKED;
		l->wscale_in = s->wscale_in;
		l->wscale_out = s->wscale_out;
		l->max_in = l->ack_out = l->ack_local = s->irs + 1;
		l->max_out = l->local_out = l->ack_in = s->iss + 1;
		l->edge_in = s->edge_in;
		l->edge_out = s->edge_out;
		l->win_out = l->win_local = s->edge_out - l->ack_out;
		l->tsval_in = l->floor_in = s->tsval_in;
		l->tsval_out = s->tsval_out;
		compare_clocks(l, l->tsval_in, m->now);
	}
}

struct model *model_new(const struct model_start *s)
{
	struct model *m = calloc(1, sizeof(*m));

	if (!m)
		abort();
	m->generation = 1;
	begin(m, s);
	return m;
}

/* As begin_anew() of splice.bpf.c: a new connection takes the place of each leg's. */
void model_replace(struct model *m, const struct model_start *s)
{
	memset(m->leg, 0, sizeof(m->leg));
	memset(m->path, 0, sizeof(m->path));
	m->generation += 2;
	begin(m, s);
}

/* May a SYN of leg 0's host take its place? As in slow_special() and fast_ingress(). */
int model_is_over(const struct model *m)
{
	__u16 a = m->path[0].word.flags, b = m->path[1].word.flags;

	if (a & PATH_SPLICED)
		return a & PATH_DEAD || a & b & PATH_FIN_ACKED;
	return m->leg[0].flags & LEG_RESET || is_over(&m->leg[0]);
}

void model_free(struct model *m) { free(m); }

void model_look(const struct model *m, int i, struct leg *to) { *to = m->leg[i]; }
__u64 model_leg_size(void) { return sizeof(struct leg); }

/* Set the clock, which stands still between two calls. */
void model_time(struct model *m, __u64 now) { m->now = now; }

static void unsplice_legs(struct model *m)
{
	wake_both(&m->leg[0], &m->leg[1], &m->path[0], &m->path[1], m->now);
	unsplice_direction(&m->leg[0], &m->leg[1]);
	unsplice_direction(&m->leg[1], &m->leg[0]);
}

/* fast_ingress() without packets. Returns 0 if the leg's record must decide. */
static int fast(struct model *m, int i, const struct seg *s, struct model_out *out)
{
	struct path *p = &m->path[i], *rev = &m->path[!i];
	union path_word w = p->word;
	int rst = s->flags & TH_RST;
	struct plan plan = {};
	enum step step;

	if (!(w.flags & PATH_SPLICED))
		return 0;
	if (w.flags & PATH_DEAD && !rst) {
		out->dropped = path_reset_again(s, &out->f);
		out->back = !out->dropped;
		return 1;
	}
	out->dropped = rst ? 0 : path_refuses(p, w, rev, s);
	if (out->dropped)
		return 1;
	if (path_leaves_gap(w, s) && path_is_from_earlier(&m->leg[i], s, m->now)) {
		out->dropped = V_OLD_TIMESTAMP;
		return 1;
	}
	if ((!rst && path_is_beyond(w, &m->leg[i], s)) || path_reset_waits(rev, w, &m->leg[i], s)) {
		stop_path(p);
		return 0;
	}
	step = path_step(p, rev, w, &m->leg[i], s, 1, seen_at(m->now), &plan);
	out->events |= plan.events;
	out->dropped = plan.dropped;
	if (step == STEP_ASK)
		path_ask(p, rev, &m->leg[i], &m->leg[!i], m->now, &plan.f);
	out->f = plan.f;
	out->fwd = step == STEP_ON || step == STEP_ASK;
	return step != STEP_RECORD;
}

/* Report the result of a step. */
static void take(struct model_out *out, enum step step, const struct seg *s, const struct plan *p)
{
	out->events |= p->events;
	out->dropped = p->dropped;
	if (step == STEP_DROP)
		return;
	out->fwd = p->fwd && !is_straddle(s, p);
	out->local = p->local || !p->fwd; /* a segment that is not forwarded is passed up */
	out->l = p->l;
	out->f = p->f;
}

/* ingress() and slow_ingress() without packets. */
static void ingress(struct model *m, int i, const struct seg *came, struct model_out *out)
{
	struct leg *l = &m->leg[i], *o = &m->leg[!i];
	struct seg segment = *came, *s = &segment;
	enum step step;
	struct plan p;
	int woken = 0;

again:
	memset(out, 0, sizeof(*out));
	memset(&p, 0, sizeof(p));
	if (fast(m, i, s, out))
		return;
	if (is_asleep(l, &m->path[i]) || is_asleep(o, &m->path[!i])) {
		wake_both(l, o, &m->path[i], &m->path[!i], m->now);
		woken = 1;
	}
	if (is_half_frozen(l, o)) {
		out->dropped = V_STALE_CPU;
		return;
	}
	s->socket_known &= may_be_behind(l) || s->flags & TH_RST;
	note_unheard(l, s, m->now);
	if (takes_back(l, s) && !(s->flags & TH_RST)) {
		note_excess(l, s);
		if (woken)
			unsplice_legs(m);
		else
			unsplice_direction(l, o);
		out->events |= 1 << EVENT_TRIGGERED;
	}
	if (!refuses(l, s))
		heard(l, s, m->now);
	if (s->flags & TH_RST) {
		step = record_reset(l, o, s, &p);
		if (step == STEP_RECORD)
			goto again;
		take(out, step, s, &p);
		return;
	}
	step = record_step(l, o, &m->key[i], &m->key[!i], s, &p);
	if (step == STEP_RECORD)
		goto again;
	if (p.events & 1 << EVENT_LIMIT_REACHED && woken)
		unsplice_legs(m);
	if (p.hold == HOLD)
		out->events |= 1;
	if (p.hold == HOLD && !p.dropped)
		p.dropped = V_HELD;
	if (step == STEP_ON && p.plain) {
		out->events |= p.events;
		out->local = out->plain = !p.lose_local;
		out->dropped = V_CE_DROPPED;
		return;
	}
	if (step == STEP_ON && lose_marked(&p) && !p.local && !p.fwd) {
		p.dropped = V_CE_DROPPED;
		step = STEP_DROP;
	}
	take(out, step, s, &p);
}

/* What a processor of model_race() does: a switch call, or a segment from leg i's host. Mirrored in src/model.rs. */
struct model_job {
	struct switch_call *call; /* or NULL */
	__u32 i;
	__u8 done; /* out: 1 */
	__u8 over; /* out: model_is_over() at its end */
	struct seg s;
	struct model_out out;
};

/* A processor of model_race(). Mirrored there, too. */
struct model_processor {
	struct model_job *jobs;
	__u64 n;
};

struct processor {
	ucontext_t at;
	struct model_processor work;
	int over;
	char stack[64 << 10];
};

static __thread struct model *busy;       /* the model that the first processor works on, before a `meanwhile` */
static __thread struct processor *racing; /* the one of model_race() that runs */
static __thread ucontext_t referee;

static void meet(void)
{
	struct model *m = busy;

	if (racing) {
		swapcontext(&racing->at, &referee);
		return;
	}
	/* A second processor would wait for a lock that is held. */
	if (!m || !m->meanwhile || locked || !m->meanwhile->meetings || --m->meanwhile->meetings)
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
	__u16 flags = m->path[i].word.flags;
	struct plan p;
	int go;

	memset(&p, 0, sizeof(p));
	if (flags & PATH_SPLICED && flags & PATH_DEAD && s->flags & TH_RST) {
		*e = (struct edit){ .seq = s->seq, .ack = s->ack, .keep = s->len, .win = s->win, .flags = s->flags };
		return 1;
	}
	go = record_egress(&m->leg[i], &m->leg[!i], &m->key[i], s, &p);
	*e = p.l;
	return go && !(flags & PATH_SPLICED);
}

void model_switch(struct model *m, struct switch_call *c)
{
	struct switch_args *g = &c->args;
	struct leg *a = &m->leg[0], *b = &m->leg[1];
	struct path *pa = &m->path[0], *pb = &m->path[1];

	g->a.leg = m->key[0];
	g->b.leg = m->key[1];
	g->result = SWITCH_OTHER;
	if ((c->generation_a && c->generation_a != m->generation) || (c->generation_b && c->generation_b != m->generation))
		return;
	g->result = SWITCH_OK;
	busy = m;
	switch (g->op) {
	case OP_FREEZE:
		g->result = freeze(g, a, b, m->now);
		break;
	case OP_COMMIT:
		g->result = may_commit(g, a, b);
		if (g->result == SWITCH_OK)
			commit_legs(g, a, b, pa, pb, 0, 0);
		break;
	case OP_UNSPLICE:
		unsplice_legs(m);
		was_bypassed(&g->a, a);
		was_bypassed(&g->b, b);
		break;
	default:
		break;
	}
	busy = NULL;
	read_positions(&g->a, &g->end_a, &g->origin_a, a, pa);
	read_positions(&g->b, &g->end_b, &g->origin_b, b, pb);
}

static __thread struct model *raced;

/* Each job answers the one before: if a segment is not forwarded, the next one is never sent. */
static void race(void)
{
	struct processor *p = racing;
	struct model_job *job = p->work.jobs;

	for (__u64 n = p->work.n; n--; job++) {
		if (job->call)
			model_switch(raced, job->call);
		else
			ingress(raced, job->i, &job->s, &job->out);
		job->done = 1;
		job->over = model_is_over(raced);
		if (!job->call && !job->out.fwd)
			break;
	}
	p->over = 1;
}

static void get_ready(struct processor *p)
{
	getcontext(&p->at);
	p->at.uc_stack.ss_sp = p->stack;
	p->at.uc_stack.ss_size = sizeof(p->stack);
	p->at.uc_link = &referee;
	makecontext(&p->at, race, 0);
}

/* Run processors side by side. Whenever they may see each other's work, `seed` says which goes on. */
void model_race(struct model *m, const struct model_processor *of, int n, __u64 seed)
{
	struct processor *all = calloc(n, sizeof(*all));
	int i, left = n;

	if (!all)
		abort();
	raced = m;
	for (i = 0; i < n; i++) {
		all[i].work = of[i];
		get_ready(&all[i]);
	}
	while (left) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		racing = &all[(seed >> 33) % n];
		if (racing->over)
			continue;
		swapcontext(&referee, &racing->at);
		left -= racing->over;
	}
	racing = NULL;
	free(all);
}

/* Have `n` bytes from leg i's host pass, as whole segments would that were acknowledged at once, too many to be sent one by one.
 * copied: they may go through the sockets. Returns 0 if they cannot pass: the direction is in the middle of a switch, or has a
 * limit. 1: they were forwarded. 2: they went through the sockets. */
int model_leap(struct model *m, int i, __u64 n, int copied)
{
	struct leg *l = &m->leg[i], *o = &m->leg[!i];
	struct path *p = &m->path[i], *rev = &m->path[!i];

	if (l->flags & (LEG_TRIGGER | LEG_HOLD | LEG_FIN_IN) || (l->flags | o->flags) & LEG_RESET || o->flags & LEG_AHEAD)
		return 0;
	if (p->word.flags & rev->word.flags & PATH_SPLICED) {
		if (p->word.flags & (PATH_FIN | PATH_DEAD))
			return 0;
		p->word.wraps += (p->word.end + n) >> 32;
		p->word.end += n;
		rev->max_ack += n;
		return 1;
	}
	if ((l->flags | o->flags) & LEG_SPLICED || (p->word.flags | rev->word.flags) & PATH_SPLICED ||
	    l->phase_in != o->phase_out || (l->phase_in != PHASE_FWD && (l->phase_in != PHASE_LOCAL || !copied)))
		return 0;
	l->max_in += n;
	l->in64 += n;
	l->ack_out += n;
	l->edge_out += n;
	o->max_out += n;
	o->ack_in += n;
	o->edge_in += n;
	if (l->phase_in == PHASE_FWD)
		return 1;
	l->ack_local += n;
	o->local_out += n;
	o->bound_out = o->ack_in; /* local_segment() moves it on */
	return 2;
}

void model_path(const struct model *m, int i, struct path *to) { *to = m->path[i]; }

/* Return place number `way` of a key in the table, as page << 32 | slot. */
__u64 model_place(const struct tuple *t, int v6, __u64 seed, __u32 pages, __u32 way)
{
	struct tuple4 k = key4(t);
	__u64 hash = v6 ? hash6(seed, t) : hash4(seed, &k);
	__u32 slots = v6 ? SLOTS6 : SLOTS4;

	return (__u64)page_of(hash, pages) << 32 | at_way(home_of(hash, slots), slots, way);
}
