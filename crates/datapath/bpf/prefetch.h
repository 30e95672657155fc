/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Fetching ahead. Among many flows, a packet's path entry is in no cache; asked for one after the other, each entry keeps the
 * processor waiting, while eight at the same time take as long as two or three. So the first packet of a batch has the entries
 * of those behind it read, before its own is looked up.
 *
 * No helper tells what is behind a packet. But while the kernel takes packets off a list (__netif_receive_skb_list_core(); NAPI
 * hands over eight at a time), skb->prev of the one that it has taken still points to the head of that list.
 *
 * All this is a hint: what is read decides nothing, and where there is no such list, or something else has left its mark in
 * skb->prev, nothing is read, or in vain. A load by such a pointer that faults gives 0. */
#ifndef LONGSPLICE_PREFETCH_H
#define LONGSPLICE_PREFETCH_H

#include "kernel.h"
#include "table.h"

#define REST_OF_BATCH 7 /* the rest of a batch: net.core.gro_normal_batch is 8 unless changed */
#define CROWD 65536     /* entries of both tables. Of fewer, the level-2 cache of a processor holds what is in use */
#define NEXT_WAYS 3     /* where nearly all entries lie that are not at home */

static __always_inline int is_worth_prefetching(void)
{
	__u32 zero = 0;
	__u64 *n = bpf_map_lookup_elem(&entries, &zero);

	return n && *n > CROWD;
}

/* The home of what begins as a TCP segment without IP options does. Whatever else it is, some home. */
static __always_inline void *home_of_packet(const void *ip, int v6)
{
	struct place p;

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
	p.slots -= NEXT_WAYS; /* so that what lies behind it is in the page, too */
	return slot_at(p, p.home);
}

static __always_inline void touch(const void *slot, int v6)
{
	*(volatile __u64 *)slot;
	if (v6)
		*(volatile __u64 *)(slot + 64);
}

/* First all homes, and then what they point to, so that no read waits for another of its kind. */
static __always_inline void fetch(struct ahead *a, struct __sk_buff *skb, int v6)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb), *head = k->prev, *n = head->next;
	__u64 size = v6 ? sizeof(struct slot6) : sizeof(struct slot4), more, lowest;
	void *homes[REST_OF_BATCH] = {};
	int i;

	if (n->prev != head) /* no list */
		return;
#pragma clang loop unroll(full)
	for (i = 0; i < REST_OF_BATCH; i++) {
		if (n == head || !n)
			break;
		homes[i] = home_of_packet(n->data, v6);
		n = n->next;
		a->left++;
	}
#pragma clang loop unroll(full)
	for (i = 0; i < REST_OF_BATCH; i++)
		if (homes[i])
			touch(homes[i], v6);
#pragma clang loop unroll(full)
	for (i = 0; i < REST_OF_BATCH; i++) {
		if (!homes[i])
			continue;
		more = *(volatile __u64 *)homes[i];
		a->found += !!more;
		more = more >> 1 & 7;
		lowest = more & -more; /* 0, 1, 2 or 4 for ways 0 to 3 */
		touch(homes[i] + ((lowest - (lowest >> 2)) & NEXT_WAYS) * size, v6);
	}
}

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
