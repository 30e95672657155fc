/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counters by verdict: what was done with packets of tracked connections. Events for user space, and rate limits on answers. */
#ifndef LONGSPLICE_VERDICT_H
#define LONGSPLICE_VERDICT_H

#include "table.h"

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

/* Count a verdict, and note it for a trace. A global function: it is called in some two hundred places, and each copy of it would
 * cost the verifier time at every start. */
__noinline int count(__u32 verdict)
{
	struct scratch *sc = scratch();

	count_only(verdict);
	if (sc)
		sc->verdicts |= 1ull << verdict;
	return 0;
}

/* Count the verdict on a packet that is dropped. Returns TCX_DROP. */
static __always_inline int drop(__u32 verdict)
{
	count(verdict);
	return TCX_DROP;
}

/* Send an event to user space. `wake`: a flag of bpf_ringbuf_submit(). A wake-up is an interrupt that the CPU sends to itself, in
 * the middle of the packet path. */
static __always_inline void submit(const struct tuple *leg, __u32 kind, const struct replaced *last, __u64 wake)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	struct path *p;

	if (!e)
		return;
	p = entry_of(leg, &e->generation);
	e->leg = *leg;
	e->kind = kind;
	e->replaced.end = last ? last->end : 0; /* one by one, without a copy on the stack */
	e->replaced.flags = last ? last->flags : 0;
	e->replaced.more = last ? last->more : 0;
	if (p)
		e->p = *p;
	else
		__builtin_memset(&e->p, 0, sizeof(e->p));
	bpf_ringbuf_submit(e, wake);
}

/* Send an event for which somebody waits. By default, the ring wakes user space only for the first unread event, but that may be
 * one that was sent without a wake-up. */
static __always_inline void tell(const struct tuple *leg, __u32 kind)
{
	submit(leg, kind, NULL, BPF_RB_FORCE_WAKEUP);
}

static __always_inline int is_polled(void)
{
	__u32 zero = 0, *polled = bpf_map_lookup_elem(&polling, &zero);

	return polled && *(volatile __u32 *)polled;
}

/* Events that can wait until user space reads the ring by itself, since no host waits for what it does then. After
 * EVENT_LIMIT_REACHED the next message may arrive at once, and after EVENT_TRIGGERED more data: these can wait in a drain, where
 * the sockets wake user space up, but not if the sockets are parked (AT_ONCE). */
#define CAN_WAIT \
	(1 << EVENT_FORWARDING | 1 << EVENT_CONTROL | 1 << EVENT_TRIGGERED | 1 << EVENT_CLOSED | 1 << EVENT_LIMIT_REACHED)
/* In the argument of tell_all(): no event of these can wait. */
#define AT_ONCE 1

/* Send one of several events. A global function, so that the verifier comes to it once, and not in each state of the loop. */
__noinline int tell_one(const struct tuple *leg, __u32 kind, __u64 wake)
{
	if (leg)
		submit(leg, kind, NULL, wake);
	return 0;
}

/* Send several events. kinds: 1 << enum event_kind, and AT_ONCE. A global function, to save its callers' stacks. */
__noinline int tell_all(const struct tuple *leg, __u32 kinds)
{
	int polled = is_polled();
	__u64 can_wait = polled ? BPF_RB_NO_WAKEUP : 0;
	struct event *e;
	__u32 kind;

	if (!leg)
		return 0;
	bpf_for(kind, EVENT_FORWARDING, EVENT_REPLACED + 1) {
		if (!(kinds >> kind & 1))
			continue;
		tell_one(leg, kind, kinds & AT_ONCE || !(CAN_WAIT >> kind & 1) ? BPF_RB_FORCE_WAKEUP : can_wait);
	}
	/* User space clears the flag before it reads the ring for the last time and sleeps. Submitting is a full barrier, so either
	 * it has read the events, or the flag is clear here. */
	if (!polled || is_polled())
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (e)
		bpf_ringbuf_discard(e, BPF_RB_FORCE_WAKEUP);
	return 0;
}

/* Part of is_due() and of may_answer(), which would otherwise be one more frame of the longest chain of calls. */
static __always_inline int by_leg(const struct tuple *leg, __u32 kind)
{
	__u64 now = bpf_ktime_get_coarse_ns(), *last;
	struct answered_key k = {};

	if (!leg)
		return 0;
	k.leg = *leg;
	k.kind = kind;
	last = bpf_map_lookup_elem(&answered, &k);
	/* Clear the lowest bit, which is no part of the time. The coarse clock stands still for a tick, so with the bit the
	 * time could be in the future, and the difference would wrap. */
	if (last && now - (*last & ~1ull) < ANSWER_INTERVAL)
		return 0;
	now = (now & ~1ull) | (kind != ANSWER_TOO_BIG || !last || !(*last & 1));
	bpf_map_update_elem(&answered, &k, &now, BPF_ANY);
	if (kind == ANSWER_TOO_BIG)
		tell(leg, EVENT_OVERSIZE);
	return now & 1;
}

/* May the leg's host get an answer of this kind, by the rate limit of one leg? For ANSWER_TOO_BIG, user space gets
 * EVENT_OVERSIZE, and finds out whether the answers help. Every other one of these is withheld. Then make_fit() forwards a
 * part of the segment, so that a host that does not receive ICMP makes progress. A global function, to save its callers'
 * stacks. */
__noinline int is_due(const struct tuple *leg, __u32 kind)
{
	return by_leg(leg, kind);
}

/* May an answer be sent, by the rate limit of the leg and that of all legs? */
__noinline int may_answer(const struct tuple *leg, __u32 kind)
{
	struct limiter *l = bpf_map_lookup_elem(&limiters, &kind);
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!l || !by_leg(leg, kind))
		return 0;
	if (l->second != now >> 30) {
		l->second = now >> 30;
		l->left = ANSWERS_PER_SECOND / 2 + bpf_get_prandom_u32() % ANSWERS_PER_SECOND;
	}
	return __sync_fetch_and_add(&l->left, -1) > 0;
}

#endif
