/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The second entry of forwarding mode, before the kernel makes a packet of what the device has received. It does what fast.h
 * does and nothing else: whatever is unusual goes on, and comes to the tcx entry. Devices are attached to by name only, since
 * some switch offloads off for it. A frame can only leave by a device that can send such frames (via.can): others go on. */
#ifndef LONGSPLICE_XDP_H
#define LONGSPLICE_XDP_H

struct net_device {
	unsigned char *dev_addr;
} __attribute__((preserve_access_index));

struct xdp_rxq_info {
	struct net_device *dev;
} __attribute__((preserve_access_index));

struct xdp_buff {
	struct xdp_rxq_info *rxq;
} __attribute__((preserve_access_index));

/* Is the frame for this device? Not if it is a broadcast or multicast, or was seen in passing. */
static __always_inline int is_for_us(struct xdp_md *ctx, const struct ethhdr *eth)
{
	struct xdp_buff *x = bpf_cast_to_kern_ctx(ctx);
	__u64 own = eight_at(x->rxq->dev->dev_addr), to = 0;

	__builtin_memcpy(&to, eth->h_dest, 6);
	return !((own ^ to) << 16);
}

SEC("xdp.frags")
int early(struct xdp_md *ctx)
{
	struct frame f = { (void *)(long)ctx->data, (void *)(long)ctx->data_end };
	struct ethhdr *eth = f.data;
	struct via *v = NULL;

	if ((void *)(eth + 1) > f.end || !is_for_us(ctx, eth))
		return XDP_PASS;
	f.len = bpf_xdp_get_buff_len(ctx) - ETH_LEN;
	f.needs = VIA_XDP;
	if (f.end - f.data < f.len + ETH_LEN)
		f.needs |= VIA_XDP_FRAGMENTS; /* in several buffers */
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		v = forward4(&f);
	else if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		v = forward6(&f);
	if (!v)
		return XDP_PASS;
	if (f.ip_len < f.len && bpf_xdp_adjust_tail(ctx, (int)(f.ip_len - f.len))) /* padding is of this link alone */
		return XDP_DROP;
	count(V_FORWARDED_EARLY);
	return bpf_redirect(v->ifindex, 0);
}

#endif
