/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The trace of one flow: a record of each segment, with its numbers on arrival, the numbers of its copies, and its verdicts.
 * Only the general way traces. PATH_TRACE makes a packet UNUSUAL for the short way, by a test that it makes anyway, so flows
 * without a trace pay nothing. User space has to keep moving TRACE_UNTIL on: an abandoned trace ends with its next segment. */
#ifndef LONGSPLICE_TRACE_H
#define LONGSPLICE_TRACE_H

#include "table.h"
#include "verdict.h"

/* Record a copy from its plan: of two copies, the first one is no longer in the packet. */
static __always_inline void trace_edit(struct trace_copy *c, const struct edit *e)
{
	c->seq = e->seq;
	c->ack = e->ack;
	c->len = e->keep;
	c->win = e->win;
	c->flags = e->flags;
	c->is = 1;
}

/* Record a copy from its TCP header. */
static __always_inline void trace_header(struct trace_copy *c, const struct tcphdr *th, __u32 len)
{
	c->seq = bpf_ntohl(th->seq);
	c->ack = bpf_ntohl(th->ack_seq);
	c->len = len;
	c->win = bpf_ntohs(th->window);
	c->flags = ((const __u8 *)th)[13];
	c->is = 1;
}

/* Record a segment, after everything was done with it except `action`, the program's return value. Returns `action`. A global
 * function, so that the verifier checks it once, and its stack frame is not part of deeper call chains. */
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
		/* For the copy in the packet, the header is more reliable than the plan. */
		trace_header(action == TCX_REDIRECT ? &r->forwarded : &r->local, &th, len);
	}
	bpf_ringbuf_submit(r, 0);
	return action;
}

#endif
