/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Prefetching of path entries. With many flows, a packet's entry is in no cache. One look-up after the other makes the
 * processor wait for each entry, while eight at the same time take only as long as two or three. So the first packet of a batch
 * reads the entries of the packets behind it, before its own is looked up.
 *
 * No helper gives access to the next packets. But while the kernel takes packets off a list (__netif_receive_skb_list_core();
 * NAPI hands over eight at a time), skb->prev of the current packet still points to the head of that list.
 *
 * All this is a hint, and decides nothing. If there is no such list, or skb->prev holds something else, nothing is read, or the
 * reads are useless. A load through such a pointer that faults returns 0. */
#ifndef LONGSPLICE_PREFETCH_H
#define LONGSPLICE_PREFETCH_H

#include "kernel.h"
#include "table.h"

#define REST_OF_BATCH 7 /* packets behind the first one: net.core.gro_normal_batch is 8 by default */
#define CROWD 65536     /* entries in both tables from which prefetching pays: fewer fit a processor's level-2 cache */
#define NEXT_WAYS 3     /* places next to the home: nearly all entries that are not at home are there */

static __always_inline int is_worth_prefetching(void)
{
	__u32 zero = 0;
	__u64 *n = bpf_map_lookup_elem(&entries, &zero);

	return n && *n > CROWD;
}

/* Return the home of a TCP segment without IP options. For any other packet, return an arbitrary home. NULL: there is no such
 * page, which does not happen. */
static __always_inline void *home_of_packet(const void *ip, int v6)
{
	struct place p;
	__u64 at;

	if (v6) {
		__u64 from[2] = { eight_at(ip + 8), eight_at(ip + 16) }, to[2] = { eight_at(ip + 24), eight_at(ip + 32) };
		__u32 ports = eight_at(ip + 40);
		struct tuple t = { .rport = ports, .lport = ports >> 16 };

		__builtin_memcpy(t.remote, from, 16);
		__builtin_memcpy(t.local, to, 16);
		p = place6(&t);
	} else {
		__u64 addresses = eight_at(ip + 12);
		__u32 ports = eight_at(ip + 20);
		struct tuple4 t = { addresses, addresses >> 32, ports, ports >> 16 };

		p = place4(&t);
	}
	at = p.home;
	/* Near the end of the page, return another slot, so that the next places are in the page, too. In assembler, because the
	 * verifier has to follow the usual case first: then the other one adds nothing for it. */
	asm volatile("if %0 >= %1 goto +1\n\tgoto +1\n\t%0 &= 127" : "+r"(at) : "r"((__u64)p.slots - NEXT_WAYS));
	return slot_at(p, at);
}

/* Read the cache lines of a slot. */
static __always_inline void touch(const void *slot, int v6)
{
	*(volatile __u64 *)slot;
	if (v6)
		*(volatile __u64 *)(slot + 64);
}

/* Read all homes of the batch first, and then the places that they point to, so that the reads of each kind overlap. A batch that
 * is not full reads the first home several times: if homes could be missing, the verifier would follow every combination. */
static __always_inline void fetch(struct ahead *a, struct __sk_buff *skb, int v6)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb), *head = k->prev, *n = head->next;
	__u64 size = v6 ? sizeof(struct slot6) : sizeof(struct slot4), more, negated, lowest;
	void *homes[REST_OF_BATCH], *home;
	int i;

	if (n->prev != head || n == head) /* not a list, or nothing behind this packet */
		return;
	home = home_of_packet(n->data, v6);
	if (!home)
		return;
#pragma clang loop unroll(full)
	for (i = 0; i < REST_OF_BATCH; i++)
		homes[i] = home;
	a->left = 1;
#pragma clang loop unroll(full)
	for (i = 1; i < REST_OF_BATCH; i++) {
		n = n->next;
		if (n == head || !n)
			break;
		home = home_of_packet(n->data, v6);
		if (!home)
			return;
		homes[i] = home;
		a->left++;
	}
#pragma clang loop unroll(full)
	for (i = 0; i < REST_OF_BATCH; i++)
		touch(homes[i], v6);
#pragma clang loop unroll(full)
	for (i = 0; i < REST_OF_BATCH; i++) {
		more = *(volatile __u64 *)homes[i];
		negated = -more;
		asm volatile("" : "+r"(negated)); /* no branch, for the reason above */
		a->found += (more | negated) >> 63;
		more = more >> 1 & 7;
		lowest = more & -more; /* 0, 1, 2 or 4 for ways 0 to 3 */
		touch(homes[i] + ((lowest - (lowest >> 2)) & NEXT_WAYS) * size, v6);
	}
}

/* Called for each packet: at the first one of a batch, read the entries of the others. */
__noinline int prefetch(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct ahead *a = bpf_map_lookup_elem(&aheads, &zero);

	if (!a)
		return 0;
	if (a->left)
		a->left--;
	else if (skb->protocol == bpf_htons(ETH_P_IP))
		fetch(a, skb, 0);
	else
		fetch(a, skb, 1);
	return 0;
}

#endif
