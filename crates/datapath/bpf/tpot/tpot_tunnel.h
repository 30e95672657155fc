/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translucent proxying: packets enter and leave tunnels, are turned round, and are reported to be too big. */
#ifndef LONGSPLICE_TPOT_TUNNEL_H
#define LONGSPLICE_TPOT_TUNNEL_H

#include "aside.h"
#include "kernel.h"
#include "mark.h"
#include "tail.h"
#include "tpot_packet.h"

#define ECN_BITS 3
#define ECN_CE 3
#define CHECKSUM_PARTIAL 3 /* <linux/skbuff.h> */
#define TTL 64 /* of the outer header */

/* Remove the outer headers. The checksum of UDP does not count: the inner one covers what matters. The outer congestion mark goes
 * to the inner packet (RFC 6040, 4.2). */
static __always_inline int decapsulate(struct __sk_buff *skb, const struct packet *outer, const struct packet *inner)
{
	__u64 flags = outer->v6 ? BPF_F_ADJ_ROOM_DECAP_L3_IPV6 : BPF_F_ADJ_ROOM_DECAP_L3_IPV4;
	int marked = (outer->tos & ECN_BITS) == ECN_CE;

	if (marked && !(inner->tos & ECN_BITS))
		return drop(T_CE_DROPPED);
	if (bpf_skb_adjust_room(skb, -(__s32)(inner_at(outer) - outer->l3), BPF_ADJ_ROOM_MAC, flags | BPF_F_ADJ_ROOM_FIXED_GSO))
		return drop(T_FAILED);
	if (marked)
		bpf_skb_ecn_set_ce(skb);
	count(T_DECAPSULATED);
	return TCX_NEXT;
}

/* The source port of a connection's tunnel: equal-cost paths hash it (RFC 6335, 6: dynamic ports). */
static __always_inline __u16 source_port(const struct tuple *t)
{
	return bpf_htons(0xc000 | mix(t) >> 18);
}

/* Write the UDP header of a tunnel: `len` bytes with it. It has no checksum (RFC 6935), because hosts could not
 * compute that of each segment of a large packet. */
static __always_inline int store_udp(struct __sk_buff *skb, __u32 at, __u16 source, __u32 len)
{
	struct udphdr uh = {
		.source = source, .dest = bpf_htons(TPOT_UDP_PORT), .len = bpf_htons(len > 65535 ? 0 : len),
	};

	return bpf_skb_store_bytes(skb, at, &uh, sizeof(uh), 0);
}

/* Put the packet into the tunnel. The inner segment's size stays as it is: the MSS has left room for the header. Routers must not
 * fragment it, whatever the inner packet says, because nobody would reassemble it: translate_error() tells the host. A segment of
 * more than 64 KB, before its segmentation, has no length in its outer header, as BIG TCP defines it. */
static __always_inline int encapsulate(struct __sk_buff *skb, const struct packet *p, const __u32 *peer, const __u32 *own,
				       int udp)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | (udp ? BPF_F_ADJ_ROOM_ENCAP_L4_UDP : 0) |
		      (p->v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4);
	__u32 len, room = tunnel_len(p->v6, udp);
	__u16 said;
	int r;

	/* what follows the IP packet stays outside of the tunnel's */
	if (bpf_skb_load_bytes(skb, p->l3 + (p->v6 ? 4 : 2), &said, 2))
		return drop(T_FAILED);
	len = !said ? skb->len - p->l3 : bpf_ntohs(said) + (p->v6 ? sizeof(struct ipv6hdr) : 0);
	r = bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, flags);
	/* A packet that was decapsulated here counts as encapsulated until Linux 7.1 or so, with the right inner header. */
	if (r == -EALREADY)
		r = bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
	if (r)
		return drop(T_FAILED);
	if (udp) {
		len += sizeof(struct udphdr);
		if (store_udp(skb, p->l3 + p->l3_len, source_port(&p->t), len))
			return drop(T_FAILED);
	}
	if (p->v6) {
		struct ipv6hdr ip = {
			.version = 6, .priority = p->tos >> 4, .flow_lbl = { (p->tos & 0xf) << 4 },
			.payload_len = bpf_htons(len > 65535 ? 0 : len), .nexthdr = udp ? IPPROTO_UDP : IPPROTO_IPV6,
			.hop_limit = TTL,
		};
		__u32 label = bpf_get_hash_recalc(skb);

		/* equal-cost paths hash the label (RFC 6438) */
		ip.flow_lbl[0] |= label >> 16 & 0xf;
		ip.flow_lbl[1] = label >> 8;
		ip.flow_lbl[2] = label;
		__builtin_memcpy(&ip.saddr, own, 16);
		__builtin_memcpy(&ip.daddr, peer, 16);
		if (bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), BPF_F_INVALIDATE_HASH))
			return drop(T_FAILED);
	} else {
		struct iphdr ip = {
			.version = 4, .ihl = 5, .tos = p->tos, .protocol = udp ? IPPROTO_UDP : IPPROTO_IPIP, .ttl = TTL,
			.frag_off = bpf_htons(0x4000),
			.tot_len = bpf_htons(len + 20 > 65535 ? 0 : len + 20), .id = bpf_get_prandom_u32(),
			.saddr = own[3], .daddr = peer[3],
		};

		ip.check = header_sum(&ip);
		if (bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), BPF_F_INVALIDATE_HASH))
			return drop(T_FAILED);
	}
	count(T_ENCAPSULATED);
	return TCX_NEXT;
}

/* Swap the addresses of an IP header, and set its length: `len` bytes follow the header. */
static __always_inline int turn_ip(struct __sk_buff *skb, const struct packet *p, __u32 len)
{
	if (p->v6) {
		struct ipv6hdr ip;
		struct in6_addr from;

		if (bpf_skb_load_bytes(skb, p->l3, &ip, sizeof(ip)))
			return -1;
		from = ip.saddr;
		ip.saddr = ip.daddr;
		ip.daddr = from;
		ip.payload_len = bpf_htons(len);
		ip.hop_limit = TTL;
		return bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0);
	}
	struct iphdr ip;
	__u32 from;

	if (bpf_skb_load_bytes(skb, p->l3, &ip, sizeof(ip)))
		return -1;
	from = ip.saddr;
	ip.saddr = ip.daddr;
	ip.daddr = from;
	ip.tot_len = bpf_htons(sizeof(ip) + len);
	ip.ttl = TTL;
	ip.check = 0;
	ip.check = header_sum(&ip);
	return bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0);
}

/* Answer on the way that the packet came: through its tunnel, or without one. tn: with an acknowledgement of what its connection
 * expects, as a challenge (RFC 5961, 4.2). Without one: with an RST (RFC 9293, 3.10.7.1). That of a SYN-ACK acknowledges it,
 * which the RFC leaves open: a taker on the way can tell by the number that it is not about its own SYN-ACK. */
static __always_inline int answer_back(struct __sk_buff *skb, const struct packet *outer, const struct packet *p,
				       const struct tpot_tunnel *tn, __u32 verdict)
{
	int opens = p->flags & TH_SYN;
	struct tcphdr th = {
		.source = p->t.lport, .dest = p->t.rport, .seq = p->flags & TH_ACK ? bpf_htonl(p->ack) : 0,
		.ack_seq = tn ? bpf_htonl(tn->ack) : opens ? bpf_htonl(p->seq + 1) : 0, .doff = 5, .rst = !tn, .ack = tn || opens,
	};
	struct sk_buff *kernel_skb = bpf_cast_to_kern_ctx(skb);
	__be32 tail[2] = { bpf_htonl(sizeof(th)), bpf_htonl(IPPROTO_TCP) };
	__u8 mac[12], turned[12];
	__s64 sum;

	sum = bpf_csum_diff(NULL, 0, (__be32 *)p->t.remote, 16, 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)p->t.local, 16, sum);
	sum = bpf_csum_diff(NULL, 0, tail, 8, sum);
	/* with a partial sum, whoever sends the packet completes that of the pseudo-header */
	if (BPF_CORE_READ_BITFIELD(kernel_skb, ip_summed) == CHECKSUM_PARTIAL)
		th.check = ~fold(sum);
	else
		th.check = fold(bpf_csum_diff(NULL, 0, (__be32 *)&th, sizeof(th), sum));
	if (cut_off(skb, p->l4 + sizeof(th), 0) || bpf_skb_store_bytes(skb, p->l4, &th, sizeof(th), 0))
		return TCX_DROP;
	if (turn_ip(skb, p, sizeof(th)))
		return TCX_DROP;
	if (outer) {
		__u32 len = p->l3_len + sizeof(th), head = inner_at(outer) - outer->l4;

		if (turn_ip(skb, outer, head + len) || (head && store_udp(skb, outer->l4, source_port(&p->t), head + len)))
			return TCX_DROP;
	}
	if (bpf_skb_load_bytes(skb, 0, mac, 12))
		return TCX_DROP;
	__builtin_memcpy(turned, mac + 6, 6);
	__builtin_memcpy(turned + 6, mac, 6);
	if (bpf_skb_store_bytes(skb, 0, turned, 12, 0))
		return TCX_DROP;
	skb->mark = MARK_PLAIN;
	count(verdict);
	return bpf_redirect(skb->ifindex, 0);
}

/* Reset the sender of a second answer to a SYN on the way that it came, because the socket's own answer would take the
 * connection's way, and would only be a challenge. */
static __always_inline int reset_back(struct __sk_buff *skb, const struct packet *outer, const struct packet *p, __u32 verdict)
{
	return answer_back(skb, outer, p, NULL, verdict);
}

/* Route a packet on past our socket with its addresses, and past the data path, which has its connection. */
static __always_inline int route_on(struct __sk_buff *skb)
{
	if (set_aside(skb))
		return drop(T_FAILED);
	skb->mark = MARK_PLAIN;
	return TCX_NEXT;
}

/* A router's report that a tunnelled packet was too big for its link. What it quotes becomes the inner packet, and the MTU that
 * of the tunnel: then it concerns the connection, and goes to its socket or, spliced, to the other host (RFC 2003, 4.1; RFC
 * 2473, 8.1). Only the headers are quoted, which is enough for both. */
static __always_inline int translate_error(struct __sk_buff *skb, const struct packet *p)
{
	__u32 at = p->l4 + 8, size, check = p->l4 + 2;
	struct packet outer = {}, in = {};
	__u8 quote[60];
	__u16 kind; /* type and code */
	struct tpot_tunnel *tn;
	__be32 mtu;
	__s64 sum;

	/* v4: unused, MTU; v6: MTU */
	if (bpf_skb_load_bytes(skb, p->l4, &kind, 2) || bpf_skb_load_bytes(skb, p->l4 + 4, &mtu, 4))
		return TCX_NEXT;
	if (kind != (p->v6 ? bpf_htons(2 << 8) : bpf_htons(3 << 8 | 4)))
		return TCX_NEXT;
	if (!parse(skb, &outer, at, p->v6, 1) || outer.proto == IPPROTO_TCP || !parse(skb, &in, inner_at(&outer), p->v6, 1) ||
	    in.proto != IPPROTO_TCP)
		return TCX_NEXT;
	tn = bpf_map_lookup_elem(&tpot_tunnels, &in.t);
	if (!tn || !same(tn->peer, outer.t.remote) || !same(tn->own, outer.t.local))
		return TCX_NEXT;
	size = in.l3_len + 20;
	if (bpf_ntohl(mtu) < 256 + (inner_at(&outer) - outer.l3))
		return TCX_NEXT;
	mtu = bpf_htonl(bpf_ntohl(mtu) - (inner_at(&outer) - outer.l3));
	if (bpf_skb_load_bytes(skb, in.l3, quote, p->v6 ? 60 : 40) || bpf_skb_change_tail(skb, at + size, 0) ||
	    bpf_skb_store_bytes(skb, at, quote, p->v6 ? 60 : 40, BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, p->l4 + 4, &mtu, 4, BPF_F_RECOMPUTE_CSUM))
		return drop(T_FAILED);
	/* compute the checksum: type, MTU, quote, and for ICMPv6 the pseudo-header */
	sum = bpf_csum_diff(NULL, 0, &mtu, 4, kind);
	if (p->v6) {
		__be32 tail[2] = { bpf_htonl(8 + size), bpf_htonl(IPPROTO_ICMPV6) };

		sum = bpf_csum_diff(NULL, 0, (__be32 *)quote, 60, sum);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)p->t.remote, 16, sum);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)p->t.local, 16, sum);
		sum = bpf_csum_diff(NULL, 0, tail, 8, sum);
	} else {
		sum = bpf_csum_diff(NULL, 0, (__be32 *)quote, 40, sum);
	}
	__u16 folded = fold(sum);

	if (bpf_skb_store_bytes(skb, check, &folded, 2, BPF_F_RECOMPUTE_CSUM) || set_length(skb, p, 8 + size))
		return drop(T_FAILED);
	count(T_TOO_BIG);
	return TCX_NEXT;
}

#endif
