/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets as they were on no wire, because a device or the kernel has joined segments. Most have one header for all segments,
 * and need nothing: docs/forwarding.md (Offloads) lists them. Two are different, and are handled here: lists of segments, and
 * IPv6 packets with a header that exists in memory only. */
#ifndef LONGSPLICE_OFFLOAD_H
#define LONGSPLICE_OFFLOAD_H

#include "kernel.h"
#include "parse.h"
#include "table.h"

#define GSO_FRAGLIST (1 << 18) /* SKB_GSO_FRAGLIST of <linux/skbuff.h> */

/* Is the packet a list of segments with headers of their own (rx-gro-list)? The kernel makes such lists, since Linux 6.10, of
 * segments for which it finds no socket, so of released flows. Only the first header can be accessed. When the list is taken
 * apart again, the others would leave with their old numbers. */
static __always_inline int is_list(struct __sk_buff *skb)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb);
	struct skb_shared_info *shared;

	if (!skb->gso_size)
		return 0;
	shared = bpf_rdonly_cast(k->head + k->end, bpf_core_type_id_kernel(struct skb_shared_info));
	return shared->gso_type & GSO_FRAGLIST && shared->frag_list;
}

/* Copy the segments of a list into one buffer, if the data path knows the connection. The kernel then segments it by its first
 * header, as any other super-packet: it finds that it is no list any more (since Linux 6.12). Returns 0 if there is no memory:
 * then the packet must be dropped. */
__noinline int make_one(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();

	if (!sc || !find_path(&sc->t))
		return 1;
	return !bpf_skb_pull_data(skb, skb->len);
}

#endif
