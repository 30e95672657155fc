/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Drop segments of spliced connections on devices that our programs are not attached to: a device that was created just now,
 * one that a new route leads to, a tunnel. After a switch, the socket's numbers differ from the host's, or there is no socket:
 * the kernel would misread the data or reset the connection. Senders retransmit the dropped segments. */
#ifndef LONGSPLICE_GUARD_H
#define LONGSPLICE_GUARD_H

#include "kernel.h"
#include "table.h"
#include "verdict.h"

#define LOOPBACK 1        /* LOOPBACK_IFINDEX of <linux/net_namespace.h> */

struct nf_hook_state {
	__u8 hook;
	__u8 pf;
	struct net_device *in, *out;
} __attribute__((preserve_access_index));

struct bpf_nf_ctx {
	const struct nf_hook_state *state;
	struct sk_buff *skb;
} __attribute__((preserve_access_index));

int bpf_dynptr_from_skb(struct __sk_buff *skb, __u64 flags, struct bpf_dynptr *ptr) __ksym;
void *bpf_dynptr_slice(const struct bpf_dynptr *ptr, __u32 offset, void *buffer, __u32 size) __ksym;

#define HOOK_IN 1 /* NF_INET_LOCAL_IN; the other one is NF_INET_POST_ROUTING */
#define PASS 1    /* NF_ACCEPT */
#define STOP 0    /* NF_DROP */

/* Read the tuple of the leg. in: the packet is for a local socket, and not from one. Returns 0 if the packet is no TCP segment
 * with ports. */
static __always_inline int tuple_of(struct sk_buff *skb, int v6, int in, struct tuple *t)
{
	struct bpf_dynptr packet;
	__u32 at = sizeof(struct ipv6hdr);
	__u8 room[sizeof(struct ipv6hdr)];
	__be16 *ports;

	if (bpf_dynptr_from_skb((struct __sk_buff *)skb, 0, &packet))
		return 0;
	if (v6) {
		struct ipv6hdr *ip6 = bpf_dynptr_slice(&packet, 0, room, sizeof(*ip6));
		__u8 next;

		if (!ip6)
			return 0;
		next = ip6->nexthdr;
		__builtin_memcpy(t->remote, in ? &ip6->saddr : &ip6->daddr, 16);
		__builtin_memcpy(t->local, in ? &ip6->daddr : &ip6->saddr, 16);
		if (next != IPPROTO_TCP) { /* as tcp_behind_extension() */
			__u8 *h = bpf_dynptr_slice(&packet, at, room, 8);

			if (!h || (next != 0 && next != 43 && next != 44 && next != 60) || h[0] != IPPROTO_TCP ||
			    (next == 44 && (h[2] || h[3] & 0xf8)))
				return 0;
			at += next == 44 ? 8 : (h[1] + 1) * 8;
		}
	} else {
		struct iphdr *ip = bpf_dynptr_slice(&packet, 0, room, sizeof(*ip));

		if (!ip || ip->protocol != IPPROTO_TCP || ip->frag_off & bpf_htons(0x1fff))
			return 0;
		tuple_from4(t, in ? ip->saddr : ip->daddr, in ? ip->daddr : ip->saddr);
		at = ip->ihl * 4;
	}
	ports = bpf_dynptr_slice(&packet, at, room, 4);
	if (!ports)
		return 0;
	t->rport = ports[!in];
	t->lport = ports[in];
	return 1;
}

/* Examine a packet that is delivered to, or was sent by, this machine. */
SEC("netfilter")
int guard(struct bpf_nf_ctx *ctx)
{
	const struct nf_hook_state *state = ctx->state;
	int in = state->hook == HOOK_IN;
	__u32 device;
	struct tuple t = {};
	struct path *p;
	struct leg *l;

	if (!in && ctx->skb->skb_iif) /* routed through, and not from a local socket */
		return PASS;
	device = in ? state->in->ifindex : state->out->ifindex;
	if (device == LOOPBACK || bpf_map_lookup_elem(&watched, &device))
		return PASS;
	if (!tuple_of(ctx->skb, state->pf == 10, in, &t)) /* AF_INET6 */
		return PASS;
	p = find_path(&t);
	if (!p)
		return PASS;
	l = bpf_map_lookup_elem(&legs, &t);
	/* LEG_AHEAD need not be checked: a socket ignores acknowledgements of bytes that it has not sent. */
	if (!(p->word.flags & PATH_SPLICED) &&
	    (!l || !(l->phase_in | l->phase_out | l->shim_in | l->shim_out | l->shim_ts)))
		return PASS;
	count_only(V_UNWATCHED);
	return STOP;
}

#endif
