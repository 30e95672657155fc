/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The short way as an XDP program, which runs before the kernel builds an skb. It does what fast.h does and nothing else;
 * unusual frames go on to the tcx program. It is attached only to devices that the user names, because some devices switch
 * offloads off for XDP. A frame can leave only by a device that accepts frames from XDP (via.flags); other frames go on to
 * tcx, too. */
#ifndef LONGSPLICE_XDP_H
#define LONGSPLICE_XDP_H

#include "fast.h"
#include "kernel.h"

struct xdp_rxq_info {
	struct net_device *dev;
} __attribute__((preserve_access_index));

struct xdp_buff {
	struct xdp_rxq_info *rxq;
} __attribute__((preserve_access_index));

/* Is the frame addressed to this device, and not broadcast, multicast, or for another station? */
static __always_inline int is_for_us(struct xdp_md *ctx, const struct ethhdr *eth)
{
	struct xdp_buff *x = bpf_cast_to_kern_ctx(ctx);
	__u64 own = eight_at(x->rxq->dev->dev_addr), to = 0;

	__builtin_memcpy(&to, eth->h_dest, 6);
	return !((own ^ to) << 16);
}

/* Has the sender left the TCP checksum to the device? Over veth and virtio, Linux does, and the field holds the sum of the
 * pseudo-header only. An skb says so, but a frame does not, and it would leave unfinished. tcx can handle it. This is checked
 * for each frame, because the other end may change its offloads at any time. One finished checksum in 65535 looks the same,
 * and goes to tcx as well. words: length of both addresses, in units of 4 bytes. */
static __always_inline int is_unfinished(const struct tcphdr *th, const __be32 *addresses, __u32 words, __u16 len)
{
	__u64 sum = bpf_htons(IPPROTO_TCP) + bpf_htons(len);
	__u32 i;

#pragma clang loop unroll(full)
	for (i = 0; i < words; i++)
		sum += addresses[i];
	return fold(sum + (__u16)~th->check) == 0xffff;
}

static __always_inline int is_unfinished4(const struct frame *f)
{
	struct iphdr *ip = f->data + ETH_LEN;
	struct tcphdr *th = (void *)(ip + 1);

	return (void *)(th + 1) <= f->end && is_unfinished(th, &ip->saddr, 2, bpf_ntohs(ip->tot_len) - sizeof(*ip));
}

static __always_inline int is_unfinished6(const struct frame *f)
{
	struct ipv6hdr *ip = f->data + ETH_LEN;
	struct tcphdr *th = (void *)(ip + 1);

	return (void *)(th + 1) <= f->end && is_unfinished(th, (__be32 *)&ip->saddr, 8, bpf_ntohs(ip->payload_len));
}

/* Forward a frame of a spliced flow, or pass it on. */
SEC("xdp.frags")
int early(struct xdp_md *ctx)
{
	struct frame f = { (void *)(long)ctx->data, (void *)(long)ctx->data_end, .xdp = ctx };
	struct ethhdr *eth = f.data;
	struct via *v = NULL;

	if ((void *)(eth + 1) > f.end || !is_for_us(ctx, eth))
		return XDP_PASS;
	f.len = bpf_xdp_get_buff_len(ctx) - ETH_LEN;
	f.needs = VIA_XDP;
	if (f.end - f.data < f.len + ETH_LEN)
		f.needs |= VIA_XDP_FRAGMENTS; /* in several buffers */
	if (eth->h_proto == bpf_htons(ETH_P_IP) && !is_unfinished4(&f))
		v = forward4(&f);
	else if (eth->h_proto == bpf_htons(ETH_P_IPV6) && !is_unfinished6(&f))
		v = forward6(&f);
	if (!v)
		return XDP_PASS;
	if (f.ip_len < f.len && bpf_xdp_adjust_tail(ctx, (int)(f.ip_len - f.len))) /* padding belongs to one link */
		return XDP_DROP;
	count_only(V_FORWARDED_EARLY);
	return bpf_redirect(v->ifindex, 0);
}

#endif
