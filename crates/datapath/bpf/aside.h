/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets that are routed although a socket of ours has their addresses. */
#ifndef LONGSPLICE_ASIDE_H
#define LONGSPLICE_ASIDE_H

#include "compat.h"

/* Leave a packet to routing although a socket of ours, which a SYN that may be forged has made, has the same addresses: the stack
 * would find it ahead of the route (early demultiplexing), and would not forward the packet then. With metadata for a tunnel,
 * which no device asks for here, the stack does not look for the socket. Returns 0, or a negative number. */
static __always_inline long set_aside(struct __sk_buff *skb)
{
	static const __u64 none; /* struct bpf_tunnel_key up to its first address, which is a length that the helper knows */

	return bpf_skb_set_tunnel_key(skb, (void *)&none, sizeof(none), 0);
}

#endif
