/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* TCP checksums of what comes in. Mostly somebody vouches for them: the device that has received the segment, or a sender on this
 * machine. Where nobody does, the short way adds up bare headers only; here, in the general way, the whole segment is read. */
#ifndef LONGSPLICE_SUM_H
#define LONGSPLICE_SUM_H

#include "kernel.h"
#include "parse.h"

/* Of <linux/skbuff.h>: CHECKSUM_UNNECESSARY, found right by the device; CHECKSUM_COMPLETE; CHECKSUM_PARTIAL, from a sender on
 * this machine, not computed yet. */
#define SUMMED_DONE 1
#define SUMMED_COMPLETE 2
#define SUMMED_PARTIAL 3

static __always_inline __u32 summed(struct __sk_buff *skb)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(k, ip_summed);
}

/* The device's own sum, if it is SUMMED_COMPLETE. */
static __always_inline __u32 summed_up(struct __sk_buff *skb)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ(k, csum);
}

static __always_inline __u32 cloned(struct __sk_buff *skb)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(k, cloned);
}

#define SUM_CHUNKS 128  /* 64 KB: what is larger was put together by GRO, which has looked at the sums */

/* The prefix of mapped addresses adds nothing: 0xffff is a zero of ones' complement. */
static __always_inline __u64 pseudo_sum(const struct scratch *sc)
{
	__u64 sum = bpf_htons(IPPROTO_TCP) + bpf_htons((__u16)(sc->pkt_len - sc->ihl));
	int i;

#pragma clang loop unroll(full)
	for (i = 0; i < 4; i++)
		sum += (__u64)sc->t.remote[i] + sc->t.local[i];
	return sum;
}

/* The ones' complement sum of `len` bytes of the packet from `at` on, 64 KB at most; -1: they cannot be read. Global, so that it
 * is verified once. */
__noinline int sum_of(struct __sk_buff *skb, __u32 at, __u32 len)
{
	__u32 zero = 0, i;
	struct sum_chunk *c = bpf_map_lookup_elem(&sum_chunks, &zero);
	__u64 sum = 0;

	if (!c)
		return -1;
	bpf_for(i, 0, SUM_CHUNKS) {
		__u32 done = i * SUM_CHUNK, n = len - done;

		if (done >= len)
			break;
		if (n > SUM_CHUNK)
			n = SUM_CHUNK;
		if (n < SUM_CHUNK)
			__builtin_memset(c->bytes, 0, SUM_CHUNK);
		n--;
		asm volatile("%0 &= %1" : "+r"(n) : "i"(SUM_CHUNK - 1)); /* what the verifier has lost */
		n++;
		if (bpf_skb_load_bytes(skb, at + done, c->bytes, n))
			return -1;
		sum += (__u32)bpf_csum_diff(0, 0, (void *)c->bytes, SUM_CHUNK, 0);
	}
	return fold(sum);
}

/* After parse(). Global, too. */
__noinline int tcp_sum_right(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__u32 how = summed(skb);
	__u64 sum;
	int rest;

	if (!sc)
		return 0;
	if (how == SUMMED_DONE || how == SUMMED_PARTIAL || skb->gso_size || sc->fragment)
		return 1; /* of a fragment it is not to be had */
	sum = pseudo_sum(sc);
	if (how == SUMMED_COMPLETE) {
		/* The device's sum begins at the IP header. That of IPv4 adds nothing, as parse() has seen. */
		__u64 all = sum + summed_up(skb);

		if (sc->v6)
			all += (__u32)~bpf_csum_diff(0, 0, (void *)sc->l3, 40, 0);
		if (fold(all) == 0xffff)
			return 1; /* otherwise it may hold padding, too */
	}
	rest = sum_of(skb, ETH_LEN + sc->ihl, sc->pkt_len - sc->ihl);
	return rest >= 0 && fold(sum + rest) == 0xffff;
}

#endif
