/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rewrite a packet as an edit says. Checksums are updated incrementally (RFC 1624) by the kernel's helpers, which handle
 * offload: a CHECKSUM_PARTIAL packet holds the sum of the pseudo-header only, and a super-packet has one header for many
 * segments. */
#ifndef LONGSPLICE_REWRITE_H
#define LONGSPLICE_REWRITE_H

#include "kernel.h"
#include "parse.h"
#include "tail.h"

/* Edit the SACK edges and timestamps of the TCP header in sc->new. */
static __always_inline void edit_options(struct scratch *sc, const struct edit *e)
{
	__u32 at = sc->ts_at, i;

	if (at >= 20 && at <= 50) {
		at = cap(at);
		if (e->strip_ts) {
			for (i = 0; i < 10; i++)
				sc->new[at + i] = 1;
		} else {
			__u32 v = bpf_htonl(e->tsval);

			__builtin_memcpy(sc->new + at + 2, &v, 4);
			/* without ACK the echo is not valid (RFC 7323, 3.2) */
			v = e->flags & TH_ACK ? bpf_htonl(e->tsecr) : 0;
			if (e->flags & TH_ACK)
				__builtin_memcpy(sc->new + at + 6, &v, 4);
		}
	}
	at = sc->sack_at;
	if (at < 20 || at > 50)
		return;
	if (e->strip_sack) {
		bpf_for(i, 0, 34) {
			if (i >= sc->sack_len)
				break;
			sc->new[cap(at + i)] = 1;
		}
		return;
	}
	bpf_for(i, 0, 8) {
		__u32 o = at + 2 + i * 4, v;

		if (o + 4 > (__u32)at + sc->sack_len || o > 56)
			break;
		o = cap(o);
		__builtin_memcpy(&v, sc->new + o, 4);
		v = bpf_ntohl(v);
		v = earlier(later(v, e->sack_lo), e->sack_hi) + e->sack_add;
		v = bpf_htonl(v);
		__builtin_memcpy(sc->new + o, &v, 4);
	}
}

/* Rewrite the TCP header. which: 0 for the local copy, 1 for the forwarded one. ports: as ports_of(), 0 to keep them. A global
 * function, so that the verifier checks it once. Returns 0, or a negative number. */
__noinline int rewrite_tcp(struct __sk_buff *skb, __u32 which, __u32 ports)
{
	struct scratch *sc = scratch();
	struct edit *e;
	struct tcphdr *th;
	__u32 n, l4;
	__s64 diff;

	if (!sc)
		return -1;
	n = sc->doff;
	if (n < 20 || n > MAX_TCP_HDR)
		return -1;
	n = cap(n);
	if (n < 20)
		return -1;
	l4 = ETH_LEN + sc->ihl;
	if (bpf_skb_load_bytes(skb, l4, sc->old, n))
		return -1;
	__builtin_memcpy(sc->new, sc->orig, 64);
	th = (void *)sc->new;
	if (which)
		e = &sc->p.f;
	else
		e = &sc->p.l;
	if (ports)
		__builtin_memcpy(sc->new, &ports, 4);
	th->seq = bpf_htonl(e->seq);
	if (e->flags & TH_ACK)
		th->ack_seq = bpf_htonl(e->ack);
	sc->new[13] = e->strip_ecn ? e->flags & ~(TH_ECE | TH_CWR) : e->flags;
	th->window = bpf_htons(e->win);
	th->urg_ptr = bpf_htons(e->urg);
	__builtin_memcpy(sc->new + TCP_CSUM_AT, sc->old + TCP_CSUM_AT, 2);
	edit_options(sc, e);
	n = cap(n) & 60;
	if (n < 20)
		return -1;
	diff = bpf_csum_diff((void *)sc->old, n, (void *)sc->new, n, 0);
	if (diff < 0)
		return -1;
	if (bpf_skb_store_bytes(skb, l4, sc->new, n, 0))
		return -1;
	return bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, 0, diff, 0);
}

/* The kernel's name of struct jumbo; it has none since Linux 7.0, which uses no such header. */
struct hop_jumbo_hdr {
	__u8 nexthdr;
} __attribute__((preserve_access_index));

/* Remove the jumbo header, from a packet that is IPv6. A global function, so that the verifier checks it once. Returns 0, or a
 * negative number. */
__noinline int cut_jumbo(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__u8 next = IPPROTO_TCP;

	if (!sc || bpf_skb_adjust_room(skb, -(__s32)sizeof(struct jumbo), BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO) ||
	    bpf_skb_store_bytes(skb, ETH_LEN + 6, &next, 1, 0))
		return -1;
	sc->jumbo = 0;
	sc->ihl -= sizeof(struct jumbo);
	sc->pkt_len -= sizeof(struct jumbo);
	return 0;
}

/* Insert a jumbo header into a packet that has just become IPv6. The IPv6 header is written later. Returns 0, or a negative
 * number. */
static __always_inline int put_jumbo(struct __sk_buff *skb, struct scratch *sc)
{
	struct jumbo j = { IPPROTO_TCP, 0, JUMBO_OPTION, 4, bpf_htonl(sc->pkt_len - sc->ihl + sizeof(j)) };

	if (bpf_skb_adjust_room(skb, sizeof(j), BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO))
		return -1;
	sc->jumbo = 1;
	return bpf_skb_store_bytes(skb, ETH_LEN + sizeof(struct ipv6hdr), &j, sizeof(j), 0);
}

/* Rewrite the IP header, and change the address family if necessary. which: 0 for the addresses of sc->t, in the direction in
 * which the packet arrived; 1 for those of sc->other, towards its host. ttl: the new TTL or hop limit. Returns 0, or a
 * negative number. */
__noinline int rewrite_ip(struct __sk_buff *skb, __u32 which, __u32 ttl)
{
	struct scratch *sc = scratch();
	struct tuple *t;
	__u32 now6, want6, wants_jumbo, l4, from_len, to_len;
	__u8 *from, *to;
	__s64 diff;

	if (!sc)
		return -1;
	t = &sc->t;
	if (which)
		t = &sc->other;
	now6 = skb->protocol == bpf_htons(ETH_P_IPV6);
	want6 = !tuple_is_v4(t);
	wants_jumbo = want6 && bpf_core_type_exists(struct hop_jumbo_hdr) && sc->pkt_len - sc->ihl > 0xffff;
	if (sc->jumbo && !wants_jumbo && cut_jumbo(skb))
		return -1;
	if (!now6 && sc->ihl > 20) {
		/* IP options concern this hop and not the other path (RFC 1812, 4.2.2.6; symmetric splice, 5.2). */
		if (bpf_skb_adjust_room(skb, 20 - (__s32)sc->ihl, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO))
			return -1;
		sc->pkt_len -= sc->ihl - 20;
		sc->ihl = 20;
	}
	/* The addresses in the packet, which the checksum covers now. */
	if (bpf_skb_load_bytes(skb, ETH_LEN + (now6 ? 8 : 12), sc->old, now6 ? 32 : 8))
		return -1;
	from_len = now6 ? 32 : 8;
	if (now6 != want6) {
		__u16 type = want6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);

		/* The helper does not change the Ethernet header. */
		if (bpf_skb_change_proto(skb, type, 0) || bpf_skb_store_bytes(skb, 12, &type, 2, 0))
			return -1;
	}
	if (wants_jumbo && !sc->jumbo && put_jumbo(skb, sc))
		return -1;
	/* length of the segment, and then of the packet */
	sc->pkt_len -= sc->ihl;
	sc->ihl = want6 ? 40 + sc->jumbo * sizeof(struct jumbo) : 20;
	sc->pkt_len += sc->ihl;
	l4 = ETH_LEN + sc->ihl;
	if (want6) {
		struct ipv6hdr *ip6 = (void *)sc->new;

		__builtin_memset(sc->new, 0, 40);
		if (sc->v6)
			__builtin_memcpy(sc->new, sc->l3, 4); /* traffic class, flow label */
		else
			sc->new[0] = 0x60 | sc->l3[1] >> 4, sc->new[1] = sc->l3[1] << 4;
		if (which && sc->p.f.strip_ecn)
			sc->new[1] &= ~(ECN_BITS << 4);
		ip6->payload_len = sc->pkt_len - sc->ihl > 0xffff ? 0 : bpf_htons(sc->pkt_len - sc->ihl);
		ip6->nexthdr = sc->jumbo ? 0 : IPPROTO_TCP;
		ip6->hop_limit = ttl;
		if (which) {
			__builtin_memcpy(&ip6->saddr, t->local, 16);
			__builtin_memcpy(&ip6->daddr, t->remote, 16);
		} else {
			__builtin_memcpy(&ip6->saddr, sc->egress ? t->local : t->remote, 16);
			__builtin_memcpy(&ip6->daddr, sc->egress ? t->remote : t->local, 16);
		}
		to = sc->new + 8;
		to_len = 32;
		if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, 40, 0))
			return -1;
	} else {
		struct iphdr *ip = (void *)sc->new;
		__u32 len = sc->pkt_len - sc->ihl + 20;
		__s64 sum;

		if (sc->v6) {
			__builtin_memset(sc->new, 0, 20);
			sc->new[1] = sc->l3[0] << 4 | sc->l3[1] >> 4;
			ip->frag_off = bpf_htons(0x4000);
		} else {
			__builtin_memcpy(sc->new, sc->l3, 20);
		}
		if (which && sc->p.f.strip_ecn)
			sc->new[1] &= ~ECN_BITS;
		sc->new[0] = 0x45;
		ip->protocol = IPPROTO_TCP;
		ip->tot_len = len > 0xffff ? 0 : bpf_htons(len);
		ip->ttl = ttl;
		ip->check = 0;
		if (which) {
			ip->saddr = t->local[3];
			ip->daddr = t->remote[3];
		} else {
			ip->saddr = sc->egress ? t->local[3] : t->remote[3];
			ip->daddr = sc->egress ? t->remote[3] : t->local[3];
		}
		sum = bpf_csum_diff(0, 0, (void *)sc->new, 20, 0);
		sum = (sum & 0xffff) + (sum >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		ip->check = ~sum;
		to = sc->new + 12;
		to_len = 8;
		if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, 20, 0))
			return -1;
	}
	from = sc->old;
	if (from_len == 8 && to_len == 8)
		diff = bpf_csum_diff((void *)from, 8, (void *)to, 8, 0);
	else if (from_len == 32 && to_len == 32)
		diff = bpf_csum_diff((void *)from, 32, (void *)to, 32, 0);
	else if (from_len == 8)
		diff = bpf_csum_diff((void *)from, 8, (void *)to, 32, 0);
	else
		diff = bpf_csum_diff((void *)from, 32, (void *)to, 8, 0);
	return bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, 0, diff, BPF_F_PSEUDO_HDR);
}

/* Cut off padding behind the IP packet, which belongs to the link where it arrived. After rewrite_ip(). */
static __always_inline int trim_padding(struct __sk_buff *skb, const struct scratch *sc)
{
	return skb->len > ETH_LEN + sc->pkt_len && cut_off(skb, ETH_LEN + sc->pkt_len, 0);
}

/* Cut the payload to `keep` bytes. The checksum covers the length and the bytes that are cut off. to_socket: as cut_off().
 * Returns 0, or a negative number. */
__noinline int trim(struct __sk_buff *skb, __u32 keep, __u32 to_socket)
{
	struct scratch *sc = scratch();
	__u32 l4, cut, len, i, at;
	__s64 sum = 0;
	__u16 v;

	if (!sc)
		return -1;
	if (keep >= sc->s.len)
		return 0;
	if (sc->jumbo && cut_jumbo(skb)) /* no packet is cut to so much (MOST_CUT) */
		return -1;
	cut = sc->s.len - keep;
	l4 = ETH_LEN + sc->ihl;
	at = l4 + sc->doff + keep;
	/* Sum of the bytes to be cut off; for CHECKSUM_PARTIAL, the helper ignores it. */
	bpf_for(i, 0, 1025) {
		__u32 left = cut - i * 64;

		if (i * 64 >= cut)
			break;
		if (left >= 64) {
			if (bpf_skb_load_bytes(skb, at + i * 64, sc->old, 64))
				return -1;
		} else {
			__builtin_memset(sc->old, 0, 64);
			left = cap(left - 1) + 1; /* as in parse_options() */
			if (bpf_skb_load_bytes(skb, at + i * 64, sc->old, left))
				return -1;
		}
		sum = bpf_csum_diff((void *)sc->old, 64, 0, 0, sum);
	}
	sum = (sum & 0xffff) + ((__u64)sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	if (keep & 1) /* they began at an odd offset (RFC 1071, 2.B) */
		sum = (sum & 0xff) << 8 | (sum >> 8 & 0xff);
	if (bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, 0, sum, 0))
		return -1;
	/* the length has 17 bits or more in a super-packet of BIG TCP */
	if (bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, fold(bpf_htonl(sc->s.len + sc->doff)), bpf_htons(keep + sc->doff),
				BPF_F_PSEUDO_HDR | 2))
		return -1;
	len = sc->ihl + sc->doff + keep;
	if (sc->ihl == 40) {
		v = bpf_htons(len - 40);
		if (bpf_skb_store_bytes(skb, ETH_LEN + 4, &v, 2, 0))
			return -1;
	} else {
		__u16 old;

		v = bpf_htons(len);
		if (bpf_skb_load_bytes(skb, ETH_LEN + 2, &old, 2) ||
		    bpf_l3_csum_replace(skb, ETH_LEN + 10, old, v, 2) || bpf_skb_store_bytes(skb, ETH_LEN + 2, &v, 2, 0))
			return -1;
	}
	sc->pkt_len = len;
	sc->s.len = keep;
	return cut_off(skb, ETH_LEN + len, to_socket);
}

#endif
