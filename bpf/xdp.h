/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The second entry of forwarding mode, before the kernel makes a packet of what the device has received. It does what fast.h
 * does and nothing else: whatever is unusual goes on, and comes to the tcx entry. Devices are attached to by name only, since
 * some switch offloads off for it. A frame can only leave by a device that can send such frames (via.can): others go on. */
#ifndef LONGSPLICE_XDP_H
#define LONGSPLICE_XDP_H

SEC("xdp.frags")
int early(struct xdp_md *ctx)
{
	struct frame f = { (void *)(long)ctx->data, (void *)(long)ctx->data_end };
	struct ethhdr *eth = f.data;
	struct via *v = NULL;

	if ((void *)(eth + 1) > f.end)
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
	count(V_FORWARDED_EARLY);
	return bpf_redirect(v->ifindex, 0);
}

#endif
