/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counters: every packet that was looked up ends in one verdict. Events, and limits on answers. */
#ifndef LONGSPLICE_VERDICT_H
#define LONGSPLICE_VERDICT_H

#include "maps.h"

#define ANSWERS_PER_SECOND 1000 /* on average, of a kind: as Linux's tcp_challenge_ack_limit once was */
#define ANSWER_INTERVAL 500000000ull /* ns between two of a kind for one leg: Linux's tcp_invalid_ratelimit */

/* By itself where there is nothing to trace: the short way, and programs that handle no packet of a leg. */
static __always_inline void count_only(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&verdicts, &verdict);

	if (n)
		(*n)++;
}

_Static_assert(V_MAX <= 64, "a word has a bit for each verdict");

/* ... and notes it for a trace. */
static __always_inline void count(__u32 verdict)
{
	struct scratch *sc = scratch();

	count_only(verdict);
	if (sc)
		sc->verdicts |= 1ull << verdict;
}

static __always_inline int drop(__u32 verdict)
{
	count(verdict);
	return TCX_DROP;
}

static __always_inline void tell(const struct tuple *leg, __u32 kind)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e)
		return;
	e->leg = *leg;
	e->kind = kind;
	bpf_ringbuf_submit(e, 0);
}

/* `kinds`: 1 << enum event_kind. Global, for the sake of its callers. */
__noinline int tell_all(const struct tuple *leg, __u32 kinds)
{
	__u32 kind;

	if (!leg)
		return 0;
	bpf_for(kind, EVENT_FORWARDING, EVENT_LIMIT_REACHED + 1)
		if (kinds >> kind & 1)
			tell(leg, kind);
	return 0;
}

/* Has the leg's host had no answer of the kind lately? Of what does not fit user space hears, and finds out if the answers help:
 * every second time they are withheld, for then a part goes on (make_fit()), and a host that does not hear gets further. Global,
 * for the sake of its callers' stacks. */
__noinline int is_due(const struct tuple *leg, __u32 kind)
{
	__u64 now = bpf_ktime_get_coarse_ns(), *last;
	struct answered_key k = {};
	int answer;

	if (!leg)
		return 0;
	k.leg = *leg;
	k.kind = kind;
	last = bpf_map_lookup_elem(&answered, &k);
	/* Without the mark: the clock stands still for a tick, and a time that is one beyond it would be long ago. */
	if (last && now - (*last & ~1ull) < ANSWER_INTERVAL)
		return 0;
	answer = kind != ANSWER_TOO_BIG || !last || !(*last & 1);
	now = (now & ~1ull) | answer;
	bpf_map_update_elem(&answered, &k, &now, BPF_ANY);
	if (kind == ANSWER_TOO_BIG)
		tell(leg, EVENT_OVERSIZE);
	return answer;
}

/* The same, and is there an answer left? */
__noinline int may_answer(const struct tuple *leg, __u32 kind)
{
	struct limiter *l = bpf_map_lookup_elem(&limiters, &kind);
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!l || !is_due(leg, kind))
		return 0;
	if (l->second != now >> 30) {
		l->second = now >> 30;
		l->left = ANSWERS_PER_SECOND / 2 + bpf_get_prandom_u32() % ANSWERS_PER_SECOND;
	}
	return __sync_fetch_and_add(&l->left, -1) > 0;
}

#endif
