/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The trace of one flow: a record of each of its segments, with its numbers as it came and as its copies left, and the verdicts.
 * Only the general way traces. PATH_TRACE is UNUSUAL for the short way, by a test that it makes anyway; so it costs nothing where
 * nobody traces. Whoever traces has to move TRACE_UNTIL on: a trace that nobody reads ends with its next segment. */
#ifndef LONGSPLICE_TRACE_H
#define LONGSPLICE_TRACE_H

#include "table.h"
#include "verdict.h"

/* A copy that was sent first, and is not in the packet any more. */
static __always_inline void trace_edit(struct trace_copy *c, const struct edit *e)
{
	c->seq = e->seq;
	c->ack = e->ack;
	c->len = e->keep;
	c->win = e->win;
	c->flags = e->flags;
	c->is = 1;
}

static __always_inline void trace_header(struct trace_copy *c, const struct tcphdr *th, __u32 len)
{
	c->seq = bpf_ntohl(th->seq);
	c->ack = bpf_ntohl(th->ack_seq);
	c->len = len;
	c->win = bpf_ntohs(th->window);
	c->flags = ((const __u8 *)th)[13];
	c->is = 1;
}

/* When all has been done with a segment but what `action` says. Global, so that it is verified once, and its frame is no part of
 * deeper chains of calls. Returns `action`. */
__noinline int trace(struct __sk_buff *skb, int action)
{
	struct scratch *sc = scratch();
	__u32 until = TRACE_UNTIL, lost = TRACE_LOST;
	__u64 now = bpf_ktime_get_ns(), *word = bpf_map_lookup_elem(&tracing, &until);
	struct trace_record *r;
	struct tcphdr th;
	struct path *p;

	if (!sc || !word)
		return action;
	if (now > *word) {
		p = find_path(&sc->t);
		if (p)
			__sync_fetch_and_and(&p->word.all, ~((__u64)PATH_TRACE << 48));
		return action;
	}
	r = bpf_ringbuf_reserve(&traces, sizeof(*r), 0);
	if (!r) {
		word = bpf_map_lookup_elem(&tracing, &lost);
		if (word)
			__sync_fetch_and_add(word, 1);
		return action;
	}
	r->leg = sc->t;
	r->from_socket = sc->egress;
	r->when = now;
	r->verdicts = sc->verdicts;
	trace_header(&r->came, (struct tcphdr *)sc->orig, sc->came);
	r->forwarded.is = r->local.is = 0;
	if (action != TCX_DROP && !bpf_skb_load_bytes(skb, ETH_LEN + sc->ihl, &th, sizeof(th))) {
		__u32 len = sc->pkt_len - sc->ihl - th.doff * 4;

		if (sc->verdicts & 1ull << V_BOTH) {
			trace_edit(&r->forwarded, &sc->p.f);
			trace_edit(&r->local, &sc->p.l);
		}
		/* what the packet says itself is surer */
		trace_header(action == TCX_REDIRECT ? &r->forwarded : &r->local, &th, len);
	}
	bpf_ringbuf_submit(r, 0);
	return action;
}

#endif
