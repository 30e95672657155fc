/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translucent proxying: packets and their options, rewritten. */
#ifndef LONGSPLICE_TPOT_PACKET_H
#define LONGSPLICE_TPOT_PACKET_H

#include "tpot_maps.h"

/* Lower the MSS by the tunnel's headers: the receiver of this SYN or SYN-ACK must leave room for them. Until the handshake is
 * over, the kind of tunnel may change, so there is room for UDP if it is possible at all. */
static __always_inline int shrink_mss(struct __sk_buff *skb, const struct packet *p, const struct options *o)
{
	struct tpot_config *c = configured();
	__u32 by = tunnel_len(p->v6, c && c->udp);
	__u32 at = o->mss, check = p->l4 + 16;
	__u16 old, new;

	if (!at || at > 38)
		return 0;
	old = o->bytes[at & 63] << 8 | o->bytes[(at + 1) & 63];
	if (old < 256 + by) /* no path is so narrow: a mistake or an attack, and no reason to make it worse */
		return 0;
	new = bpf_htons(old - by);
	old = bpf_htons(old);
	if (bpf_skb_store_bytes(skb, p->l4 + 20 + at, &new, 2, 0))
		return -1;
	if (at & 1) /* the sum's words do not begin where the value does */
		return bpf_l4_csum_replace(skb, check, __builtin_bswap16(old), __builtin_bswap16(new), 2);
	return bpf_l4_csum_replace(skb, check, old, new, 2);
}

/* Fold a sum, and complement it. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* The sum of an IPv4 header without options. */
static __always_inline __u16 header_sum(struct iphdr *ip)
{
	return fold(bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

/* Set the length of the IP packet: `len` bytes follow the header. */
static __always_inline int set_length(struct __sk_buff *skb, const struct packet *p, __u32 len)
{
	__u16 old, new = bpf_htons(p->v6 ? len : len + p->l3_len);
	__u32 at = p->l3 + (p->v6 ? 4 : 2);

	if (bpf_skb_load_bytes(skb, at, &old, 2) || bpf_skb_store_bytes(skb, at, &new, 2, 0))
		return -1;
	return p->v6 ? 0 : bpf_l3_csum_replace(skb, p->l3 + 10, old, new, 2);
}

static __always_inline struct tpot_option our_option(const struct tpot_config *c, __u8 length, __u8 hops, __u16 capabilities)
{
	return (struct tpot_option){
		.kind = TPOT_KIND, .length = length, .exid = bpf_htons(c->exid), .version = TPOT_VERSION, .hops = hops,
		.capabilities = bpf_htons(capabilities),
	};
}

/* Append our option to a SYN or SYN-ACK. Returns 0 if it is there, 1 if it does not fit, and below 0 on errors, after which the
 * packet may be damaged. */
static __always_inline int append(struct __sk_buff *skb, const struct packet *p, void *option, __u32 size)
{
	__u32 end = p->l4 + p->doff, check = p->l4 + 16;
	__u16 old, new;
	__s64 sum;

	if (p->doff + size > 60 || skb->len != end) /* data: TCP fast open */
		return 1;
	if (bpf_skb_change_tail(skb, end + size, 0) || bpf_skb_store_bytes(skb, end, option, size, 0))
		return -1;
	sum = bpf_csum_diff(NULL, 0, option, size, 0);
	if (sum < 0 || bpf_l4_csum_replace(skb, check, 0, sum, 0))
		return -1;
	/* the length in the pseudo-header, then the data offset */
	if (bpf_l4_csum_replace(skb, check, bpf_htons(p->doff), bpf_htons(p->doff + size), 2 | BPF_F_PSEUDO_HDR))
		return -1;
	if (bpf_skb_load_bytes(skb, p->l4 + 12, &old, 2))
		return -1;
	new = (old & bpf_htons(0x0fff)) | bpf_htons((p->doff + size) << 10);
	if (bpf_skb_store_bytes(skb, p->l4 + 12, &new, 2, 0) || bpf_l4_csum_replace(skb, check, old, new, 2))
		return -1;
	return set_length(skb, p, p->doff + size);
}

#endif
