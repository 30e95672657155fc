/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The tap: copies of the bytes that are forwarded, for user space to read while the flow goes on. Only the general way copies:
 * a path that is tapped names a next hop that does not exist (VIA_TAP), which is UNUSUAL for the short way, at no cost to others.
 * Nothing waits for the reader. Without room in the ring a copy is lost and counted, and user space finds the gap. */
#ifndef LONGSPLICE_TAP_H
#define LONGSPLICE_TAP_H

#include "parse.h"
#include "step.h"
#include "verdict.h"

#define TAP_CHUNKS 33 /* of one packet: 512 KB (BIG TCP) and what the last one has begun */

/* Copies `len` bytes of payload, the first of which is at `at` (kind: enum tap_position). Before anything is rewritten.
 * acked: what the other host has acknowledged, relative to `at`. Global, so that it is verified once. */
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
		asm volatile("%0 &= %1" : "+r"(n) : "i"(TAP_CHUNK - 1)); /* what the verifier has lost */
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

/* Of a path entry, as `w` has found it. */
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
