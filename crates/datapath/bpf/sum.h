/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* TCP checksums of incoming segments. Mostly, the receiving device or a sender on this machine vouches for them. Otherwise,
 * the short way verifies segments without payload only; this code, for the general way, reads the whole segment. */
#ifndef LONGSPLICE_SUM_H
#define LONGSPLICE_SUM_H

#include "kernel.h"
#include "parse.h"

/* Values of ip_summed, from <linux/skbuff.h>: CHECKSUM_UNNECESSARY (verified by the device), CHECKSUM_COMPLETE (summed by the
 * device) and CHECKSUM_PARTIAL (from a sender on this machine, not computed yet). */
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

#define SUM_CHUNKS 128  /* 64 KB: larger packets were built by GRO, which has verified the checksums */

/* The sum of the pseudo-header. The prefix of IPv4-mapped addresses adds nothing: 0xffff is zero in one's complement. */
static __always_inline __u64 pseudo_sum(const struct scratch *sc)
{
	__u64 sum = bpf_htons(IPPROTO_TCP) + bpf_htons((__u16)(sc->pkt_len - sc->ihl));
	int i;

#pragma clang loop unroll(full)
	for (i = 0; i < 4; i++)
		sum += (__u64)sc->t.remote[i] + sc->t.local[i];
	return sum;
}

/* Return the one's complement sum of `len` bytes of the packet from offset `at` on, 64 KB at most, or -1 if they cannot be
 * read. A global function, so that the verifier checks it once. */
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
		asm volatile("%0 &= %1" : "+r"(n) : "i"(SUM_CHUNK - 1)); /* shows the verifier the limit that it has lost */
		n++;
		if (bpf_skb_load_bytes(skb, at + done, c->bytes, n))
			return -1;
		sum += (__u32)bpf_csum_diff(0, 0, (void *)c->bytes, SUM_CHUNK, 0);
	}
	return fold(sum);
}

/* Is the TCP checksum right, as far as it can be known? After parse(). A global function, too. */
__noinline int tcp_sum_right(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__u32 how = summed(skb);
	__u64 sum;
	int rest;

	if (!sc)
		return 0;
	if (how == SUMMED_DONE || how == SUMMED_PARTIAL || skb->gso_size || sc->fragment)
		return 1; /* a fragment alone cannot be verified */
	sum = pseudo_sum(sc);
	if (how == SUMMED_COMPLETE) {
		/* The device's sum begins at the IP header. A correct IPv4 header adds nothing, and parse() has verified it. */
		__u64 all = sum + summed_up(skb);

		if (sc->v6)
			all += (__u32)~bpf_csum_diff(0, 0, (void *)sc->l3, 40, 0);
		if (fold(all) == 0xffff)
			return 1; /* if not, the device's sum may include padding: read the segment */
	}
	rest = sum_of(skb, ETH_LEN + sc->ihl, sc->pkt_len - sc->ihl);
	return rest >= 0 && fold(sum + rest) == 0xffff;
}

#endif
