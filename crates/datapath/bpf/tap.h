/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Taps: copies of forwarded bytes, which user space reads while the flow goes on. Only the general way copies. The path entry
 * of a tapped flow names a next hop that does not exist (VIA_TAP), so its packets are UNUSUAL for the short way, at no cost to
 * other flows. Nothing waits for the reader. If the ring is full, the copy is lost and counted, and user space finds the gap. */
#ifndef LONGSPLICE_TAP_H
#define LONGSPLICE_TAP_H

#include "parse.h"
#include "step.h"
#include "verdict.h"

#define TAP_CHUNKS 33 /* limit of pieces of one packet: 512 KB (BIG TCP), and an incomplete piece */

/* Copy `len` bytes of payload, the first of which is at position `at`. To be called before anything is rewritten. kind: enum
 * tap_position. acked: highest acknowledgement of the other host, relative to `at`. A global function, so that the verifier
 * checks it once. */
__noinline int tap(struct __sk_buff *skb, __u64 at, __u32 kind, __s32 acked, __u32 len)
{
	struct scratch *sc = scratch();
	__u32 zero = 0, from, i;
	struct tap_chunk *c = bpf_map_lookup_elem(&tap_chunks, &zero);

	if (!sc || !c)
		return 0;
	from = ETH_LEN + sc->ihl + sc->doff;
	c->head.leg = sc->t;
	c->head.kind = kind;
	bpf_for(i, 0, TAP_CHUNKS) {
		__u32 done = i * TAP_CHUNK, n = len - done;

		if (done >= len)
			return 0;
		if (n > TAP_CHUNK)
			n = TAP_CHUNK;
		c->head.at = at + done;
		c->head.acked = acked - (__s32)done;
		c->head.len = n;
		n--;
		asm volatile("%0 &= %1" : "+r"(n) : "i"(TAP_CHUNK - 1)); /* shows the verifier the limit that it has lost */
		n++;
		if (bpf_skb_load_bytes(skb, from + done, c->bytes, n) ||
		    bpf_ringbuf_output(&taps, c, sizeof(c->head) + n, 0)) {
			count(V_TAP_LOST);
			return 0;
		}
		count(V_TAPPED);
	}
	return 0;
}

/* Copy the payload of a segment in forwarding mode. w: the word of its entry before the segment. */
static __always_inline void tap_path(struct __sk_buff *skb, struct scratch *sc, const struct path *p, const struct path *rev,
				     union path_word w)
{
	__s32 acked = path_expected(rev) - sc->s.seq;

	if (w.flags & PATH_TRIGGER)
		tap(skb, sc->s.seq, TAP_LOW, acked, sc->s.len);
	else
		tap(skb, (((__u64)w.wraps << 32) + w.end) + (__s32)(sc->s.seq - w.end), TAP_EXTENDED, acked, sc->s.len);
}

#endif
