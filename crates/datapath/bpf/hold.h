/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The hold policy (Spatscheck et al., III-C): segments that arrive in a drain wait for its end. BPF cannot queue packets, so
 * they go to user space. When the drain is over or was taken back, user space sends them, with a mark, into the egress of the
 * device by which they arrived. egress() turns them round to ingress(), as if they had just arrived. If one is lost meanwhile,
 * its host retransmits it.
 * With LEG_WAITS, the first data of a connection between hosts waits in the same way, until user space has spliced the flow or
 * begins to copy: a flow that is spliced at once carries no byte through the sockets. */
#ifndef LONGSPLICE_HOLD_H
#define LONGSPLICE_HOLD_H

#include "mark.h"
#include "parse.h"
#include "switch.h"
#include "verdict.h"

#define HOLD_CHUNKS 33 /* limit of pieces of one packet: 512 KB (BIG TCP), and an incomplete piece */
#define HOLD_ALL (64 << 20) /* limit for all flows, bytes: enough for eight flows at their limit, or hundreds of usual ones */

/* Give user space one piece of the payload, or the headers alone for a FIN without payload. Returns 0, or a negative number. */
static __always_inline int hold_piece(struct __sk_buff *skb, struct hold_chunk *c, __u32 from, __u32 n)
{
	c->head.len = n;
	if (n) {
		n--;
		asm volatile("%0 &= %1" : "+r"(n) : "i"(HOLD_CHUNK - 1)); /* shows the verifier the limit that it has lost */
		n++;
		if (bpf_skb_load_bytes(skb, from, c->bytes, n))
			return -1;
	}
	return bpf_ringbuf_output(&held, c, sizeof(c->head) + (n & (2 * HOLD_CHUNK - 1)), 0);
}

/* Hold a segment as plan.hold says, or count that it could not be held. After parse_options(), and before anything is
 * rewritten. A global function, so that the verifier checks it once. */
__noinline int hold(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__u32 zero = 0, one = HELD_BACK, from, len, i;
	struct hold_chunk *c = bpf_map_lookup_elem(&hold_chunks, &zero);
	__u64 *given = bpf_map_lookup_elem(&holding, &zero), *back = bpf_map_lookup_elem(&holding, &one);

	if (!sc || !c || !given || !back)
		return 0;
	from = ETH_LEN + sc->ihl + sc->doff;
	len = sc->s.len;
	if (sc->p.hold == HOLD_FULL || *given - *back + len > HOLD_ALL || bpf_skb_load_bytes(skb, 0, c->head.eth, ETH_LEN)) {
		count(V_HOLD_OVERFLOW);
		return 0;
	}
	c->head.leg = sc->t;
	c->head.ifindex = skb->ifindex;
	c->head.payload = len;
	c->head.segment = skb->gso_size;
	__builtin_memcpy(c->head.ip, sc->l3, 40);
	__builtin_memcpy(c->head.tcp, sc->orig, 60);
	bpf_for(i, 0, HOLD_CHUNKS) {
		__u32 done = sc->p.held_from + i * HOLD_CHUNK, n = len - done;

		if (i && done >= len)
			break;
		if (n > HOLD_CHUNK)
			n = HOLD_CHUNK;
		c->head.at = done;
		if (hold_piece(skb, c, from + done, n)) {
			count(V_HOLD_OVERFLOW);
			return 0;
		}
		__sync_fetch_and_add(given, n);
	}
	count(V_HELD);
	return 1;
}

/* Hold no more of the host's first data. */
static __always_inline void wait_no_more(struct leg *l)
{
	bpf_spin_lock(&l->lock);
	l->flags &= ~LEG_WAITS;
	bpf_spin_unlock(&l->lock);
}

/* Must the segment wait until user space has decided whether to splice the flow? A fragment cannot be held. A retransmission ends
 * the wait: user space has taken longer than the host's timeout, and may be dead. So it cannot keep a segment for ever. */
static __always_inline int waits(struct leg *l, const struct scratch *sc)
{
	__u32 end = sc->s.seq + sc->s.len + !!(sc->s.flags & TH_FIN);
	int first;

	if (!(l->flags & LEG_WAITS) || end == sc->s.seq || sc->s.again || sc->fragment || refuses(l, &sc->s))
		return 0;
	bpf_spin_lock(&l->lock);
	first = !l->held || after(end, l->held_in); /* a freeze sets both for the hold policy */
	if (first) {
		l->held_in = end;
		l->held = 1;
	} else {
		l->flags &= ~LEG_WAITS;
	}
	bpf_spin_unlock(&l->lock);
	return first;
}

#endif
