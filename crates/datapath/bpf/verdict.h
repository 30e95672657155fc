/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counters by verdict: what was done with packets of tracked connections. Events for user space, and rate limits on answers. */
#ifndef LONGSPLICE_VERDICT_H
#define LONGSPLICE_VERDICT_H

#include "maps.h"

#define ANSWERS_PER_SECOND 1000 /* average limit for one kind of answer: the former default of Linux's tcp_challenge_ack_limit */
#define ANSWER_INTERVAL 500000000ull /* ns between two answers of a kind for one leg: as Linux's tcp_invalid_ratelimit */

/* Count a verdict. Called directly where nothing can be traced: in the short way, and in programs without a packet of a leg. */
static __always_inline void count_only(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&verdicts, &verdict);

	if (n)
		(*n)++;
}

_Static_assert(V_MAX <= 64, "a word has a bit for each verdict");

/* Count a verdict, and note it for a trace. */
static __always_inline void count(__u32 verdict)
{
	struct scratch *sc = scratch();

	count_only(verdict);
	if (sc)
		sc->verdicts |= 1ull << verdict;
}

/* Count the verdict on a packet that is dropped. Returns TCX_DROP. */
static __always_inline int drop(__u32 verdict)
{
	count(verdict);
	return TCX_DROP;
}

/* Send an event to user space. */
static __always_inline void tell(const struct tuple *leg, __u32 kind)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e)
		return;
	e->leg = *leg;
	e->kind = kind;
	bpf_ringbuf_submit(e, 0);
}

/* Send several events. kinds: 1 << enum event_kind. A global function, to save its callers' stacks. */
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

/* May the leg's host get an answer of this kind, by the rate limit of one leg? For ANSWER_TOO_BIG, user space gets
 * EVENT_OVERSIZE, and finds out whether the answers help. Every other one of these is withheld. Then make_fit() forwards a
 * part of the segment, so that a host that does not receive ICMP makes progress. A global function, to save its callers'
 * stacks. */
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
	/* Clear the lowest bit, which is no part of the time. The coarse clock stands still for a tick, so with the bit the
	 * time could be in the future, and the difference would wrap. */
	if (last && now - (*last & ~1ull) < ANSWER_INTERVAL)
		return 0;
	answer = kind != ANSWER_TOO_BIG || !last || !(*last & 1);
	now = (now & ~1ull) | answer;
	bpf_map_update_elem(&answered, &k, &now, BPF_ANY);
	if (kind == ANSWER_TOO_BIG)
		tell(leg, EVENT_OVERSIZE);
	return answer;
}

/* May an answer be sent, by the rate limit of the leg and that of all legs? */
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
