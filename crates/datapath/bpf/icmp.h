/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Path MTU discovery (RFC 1191, RFC 8201) across a splice. A segment that does not fit is answered as by a router. A router's
 * error about a forwarded segment is translated for the segment's first sender, who knows the connection by other addresses
 * and numbers. */
#ifndef LONGSPLICE_ICMP_H
#define LONGSPLICE_ICMP_H

#include "fast.h"
#include "rewrite.h"

#define ICMP_UNREACH 3
#define ICMP_NEEDFRAG 4
#define ICMP6_TOO_BIG 2
/* The smallest MTU that a host is told, in its own address family. Hosts keep what they are told for all connections to the same
 * address, so one connection must not make them send small packets to everybody behind us. IPv6 hosts need not send smaller
 * packets (RFC 8200, 5), and no tunnel leaves less of an Ethernet link. Also in can_fit() (switch.rs). */
#define LEAST_TOLD 1280

struct icmp_error {
	__u8 type, code;
	__u16 check;
	__u16 unused;
	__be16 mtu4; /* ICMPv6: the low half of the 32-bit MTU */
};

static __always_inline __u16 sum_to_check(__s64 sum)
{
	return ~fold((__u64)sum);
}

/* Add the quoted bytes of an error to a checksum: the IP header and 20 bytes of the TCP header. With CHECKSUM_PARTIAL, the
 * device will fill in the TCP checksum. The sum of that header is then the complement of what the field holds now. */
static __always_inline __s64 sum_quoted(struct __sk_buff *skb, struct scratch *sc, __s64 sum)
{
	sum = sc->v6 ? bpf_csum_diff(0, 0, (void *)sc->l3, 40, sum) : bpf_csum_diff(0, 0, (void *)sc->l3, 20, sum);
	if (summed(skb) == SUMMED_PARTIAL) {
		__u32 k = (__u16)~*(__u16 *)(sc->orig + TCP_CSUM_AT);

		return bpf_csum_diff(0, 0, (void *)&k, 4, sum);
	}
	return bpf_csum_diff(0, 0, (void *)sc->orig, 20, sum);
}

/* Turn the packet into a "too big" error to its sender. mtu: largest IP packet in the sender's address family, bytes. */
__noinline int answer_too_big(struct __sk_buff *skb, __u32 mtu)
{
	struct scratch *sc = scratch();
	struct icmp_error *icmp;
	__u32 l3;
	__s64 sum;

	if (!sc)
		return TCX_DROP;
	count(V_OVERSIZE);
	l3 = sc->v6 ? 40 : 20;
	if (bpf_skb_load_bytes(skb, 0, sc->mac, 12) ||
	    cut_off(skb, ETH_LEN + l3 + 20, 0) || bpf_skb_adjust_room(skb, l3 + 8, BPF_ADJ_ROOM_MAC, 0))
		return TCX_DROP;
	__builtin_memcpy(sc->hop, sc->mac + 6, 6);
	__builtin_memcpy(sc->hop + 6, sc->mac, 6);
	__builtin_memset(sc->new, 0, 64);
	if (sc->v6) {
		struct ipv6hdr *in = (void *)sc->l3, *ip = (void *)sc->new;
		__be32 pseudo[2] = { bpf_htonl(8 + 40 + 20), bpf_htonl(IPPROTO_ICMPV6) };

		sc->new[0] = 0x60;
		ip->payload_len = bpf_htons(8 + 40 + 20);
		ip->nexthdr = IPPROTO_ICMPV6;
		ip->hop_limit = 64;
		__builtin_memcpy(&ip->saddr, &in->daddr, 16);
		__builtin_memcpy(&ip->daddr, &in->saddr, 16);
		icmp = (void *)sc->new + 40;
		icmp->type = ICMP6_TOO_BIG;
		icmp->mtu4 = bpf_htons(mtu);
		sum = bpf_csum_diff(0, 0, (void *)&ip->saddr, 32, 0);
		sum = bpf_csum_diff(0, 0, (void *)pseudo, 8, sum);
		sum = bpf_csum_diff(0, 0, (void *)icmp, 8, sum);
		icmp->check = sum_to_check(sum_quoted(skb, sc, sum));
		if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, 48, 0))
			return TCX_DROP;
	} else {
		struct iphdr *in = (void *)sc->l3, *ip = (void *)sc->new;

		sc->new[0] = 0x45;
		sc->new[1] = 0xc0; /* internetwork control (RFC 1812, 4.3.2.5) */
		ip->tot_len = bpf_htons(20 + 8 + 40);
		ip->ttl = 64;
		ip->protocol = IPPROTO_ICMP;
		ip->saddr = in->daddr;
		ip->daddr = in->saddr;
		ip->check = sum_to_check(bpf_csum_diff(0, 0, (void *)ip, 20, 0));
		icmp = (void *)sc->new + 20;
		icmp->type = ICMP_UNREACH;
		icmp->code = ICMP_NEEDFRAG;
		icmp->mtu4 = bpf_htons(mtu);
		sum = bpf_csum_diff(0, 0, (void *)icmp, 8, 0);
		icmp->check = sum_to_check(sum_quoted(skb, sc, sum));
		if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, 28, 0))
			return TCX_DROP;
	}
	if (bpf_skb_store_bytes(skb, 0, sc->hop, 12, 0))
		return TCX_DROP;
	return bpf_redirect(skb->ifindex, 0);
}

/* Convert the MTU of the outgoing link to the sender's address family: IPv4 and IPv6 headers differ by 20 bytes. */
static __always_inline __u32 mtu_for_sender(const struct scratch *sc, __u32 mtu)
{
	if (!is_crossed(sc))
		return mtu;
	return sc->v6 ? mtu + 20 : mtu - 20;
}

/* Length of the IP and TCP headers where the packet leaves, bytes. */
static __always_inline __u32 headers(const struct scratch *sc, __u32 doff)
{
	return (tuple_is_v4(&sc->other) ? 20 : 40) + doff;
}

/* Handle a segment, or a super-packet with segments, that does not fit the outgoing link. Its sender is told, at a limited
 * rate, unless that would be too small for its other connections. But some hosts never receive ICMP, and a switch cannot end
 * without the data that has to be forwarded. So at other times the part that fits is forwarded, and the rest is retransmitted.
 * A segment without payload is forwarded in any case: it cannot be cut, and a connection without acknowledgements stalls.
 * Returns 0 to forward the packet, or else the program's return value. */
__noinline int make_fit(struct __sk_buff *skb, __u32 mtu)
{
	struct scratch *sc = scratch();
	__u32 used, told;
	int simple;

	if (!sc)
		return TCX_DROP;
	used = headers(sc, sc->doff);
	if (!mtu || !sc->s.len || used + (skb->gso_size ? skb->gso_size : sc->s.len) <= mtu)
		return 0;
	if (sc->jumbo && cut_jumbo(skb))
		return drop(V_REWRITE_FAILED);
	simple = sc->ihl == (sc->v6 ? 40 : 20);
	told = mtu_for_sender(sc, mtu);
	if (told < LEAST_TOLD)
		is_due(&sc->t, ANSWER_TOO_BIG); /* reports EVENT_OVERSIZE */
	else if (simple && may_answer(&sc->t, ANSWER_TOO_BIG))
		return answer_too_big(skb, told);
	if (!simple || mtu <= used || sc->fragment)
		return drop(V_OVERSIZE);
	count(V_CUT);
	sc->s.flags &= ~TH_FIN;
	/* with zeros behind the IP packet, the link would still drop it */
	return trim(skb, mtu - used, 0) || skb->len > ETH_LEN + sc->pkt_len ? drop(V_REWRITE_FAILED) : 0;
}

/* Parse an ICMP error about a TCP segment. Sets sc->t to the leg where the quoted segment has left, sc->l3 to the IP header,
 * sc->old to the ICMP header followed by the quoted IP header, and sc->orig to the first 8 bytes of the segment. Returns 0 if
 * the packet is no such error, or damaged. */
static __always_inline int parse_error(struct __sk_buff *skb, struct scratch *sc)
{
	struct icmp_error *icmp = (void *)sc->old;
	__be32 *pseudo = (void *)sc->l3 + 8;
	__u64 sum = 0;
	int i, rest;

	sc->v6 = skb->protocol == bpf_htons(ETH_P_IPV6);
	if (sc->v6) {
		struct ipv6hdr *ip = (void *)sc->l3, *q = (void *)sc->old + 8;

		/* Check the protocol first: most packets that get here are UDP. */
		if (bpf_skb_load_bytes(skb, ETH_LEN, sc->l3, 40) || ip->version != 6 || ip->nexthdr != IPPROTO_ICMPV6)
			return 0;
		if (bpf_skb_load_bytes(skb, ETH_LEN + 40, sc->old, 48) || bpf_skb_load_bytes(skb, ETH_LEN + 88, sc->orig, 8) ||
		    icmp->type > ICMP6_TOO_BIG || q->version != 6 || q->nexthdr != IPPROTO_TCP)
			return 0;
		sc->ihl = 40;
		sc->ttl = ip->hop_limit;
		sc->pkt_len = 40 + bpf_ntohs(ip->payload_len);
		__builtin_memcpy(sc->t.remote, &q->daddr, 16);
		__builtin_memcpy(sc->t.local, &q->saddr, 16);
#pragma clang loop unroll(full)
		for (i = 0; i < 8; i++)
			sum += pseudo[i];
		sum += bpf_htons(IPPROTO_ICMPV6) + ip->payload_len;
	} else {
		struct iphdr *ip = (void *)sc->l3, *q = (void *)sc->old + 8;

		if (bpf_skb_load_bytes(skb, ETH_LEN, sc->l3, 20) || sc->l3[0] != 0x45 || ip->protocol != IPPROTO_ICMP)
			return 0;
		if (bpf_skb_load_bytes(skb, ETH_LEN + 20, sc->old, 28) || bpf_skb_load_bytes(skb, ETH_LEN + 48, sc->orig, 8) ||
		    icmp->type != ICMP_UNREACH || sc->old[8] != 0x45 || q->protocol != IPPROTO_TCP || q->frag_off & bpf_htons(0x1fff) ||
		    fold(bpf_csum_diff(0, 0, (void *)sc->l3, 20, 0)) != 0xffff)
			return 0;
		sc->ihl = 20;
		sc->ttl = ip->ttl;
		sc->pkt_len = bpf_ntohs(ip->tot_len);
		tuple_from4(&sc->t, q->daddr, q->saddr);
	}
	__builtin_memcpy(&sc->t.lport, sc->orig, 2);
	__builtin_memcpy(&sc->t.rport, sc->orig + 2, 2);
	if (sc->pkt_len < sc->ihl + 8 || sc->pkt_len > skb->len - ETH_LEN)
		return 0;
	rest = sum_of(skb, ETH_LEN + sc->ihl, sc->pkt_len - sc->ihl);
	return rest >= 0 && fold(sum + rest) == 0xffff;
}

/* Replace an error that parse_error() has read by a "too big" error to the host of sc->other, about that host's segment at
 * sc->s.seq. mtu: in that host's address family. The error quotes 8 bytes of the segment, which is all that hosts need (RFC
 * 792). */
__noinline int write_too_big(struct __sk_buff *skb, __u32 mtu)
{
	struct scratch *sc = scratch();
	__u32 v4, l3, quoted_len;
	struct icmp_error *icmp;
	__be32 *segment;
	__u16 type;

	if (!sc)
		return -1;
	v4 = tuple_is_v4(&sc->other);
	l3 = v4 ? 20 : 40;
	quoted_len = sc->s.len; /* without the IP header */
	type = v4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	if (is_crossed(sc) && (bpf_skb_change_proto(skb, type, 0) || bpf_skb_store_bytes(skb, 12, &type, 2, 0)))
		return -1;
	if (bpf_skb_change_tail(skb, ETH_LEN + l3 + 8 + l3 + 8, 0))
		return -1;
	__builtin_memset(sc->new, 0, 64);
	__builtin_memset(sc->old, 0, 64);
	if (v4) {
		struct iphdr *ip = (void *)sc->new, *q = (void *)sc->new + 28;

		sc->new[0] = sc->new[28] = 0x45;
		sc->new[1] = 0xc0;
		ip->tot_len = bpf_htons(20 + 8 + 20 + 8);
		ip->ttl = sc->ttl - 1;
		ip->protocol = IPPROTO_ICMP;
		ip->saddr = q->daddr = sc->other.local[3];
		ip->daddr = q->saddr = sc->other.remote[3];
		ip->check = sum_to_check(bpf_csum_diff(0, 0, (void *)ip, 20, 0));
		q->tot_len = bpf_htons(20 + quoted_len);
		q->frag_off = bpf_htons(0x4000);
		q->ttl = 64;
		q->protocol = IPPROTO_TCP;
		q->check = sum_to_check(bpf_csum_diff(0, 0, (void *)q, 20, 0));
		icmp = (void *)sc->new + 20;
		icmp->type = ICMP_UNREACH;
		icmp->code = ICMP_NEEDFRAG;
		icmp->mtu4 = bpf_htons(mtu);
		segment = (void *)sc->new + 48;
	} else {
		struct ipv6hdr *ip = (void *)sc->new, *q = (void *)sc->old;

		sc->new[0] = sc->old[0] = 0x60;
		ip->payload_len = bpf_htons(8 + 40 + 8);
		ip->nexthdr = IPPROTO_ICMPV6;
		ip->hop_limit = sc->ttl - 1;
		__builtin_memcpy(&ip->saddr, sc->other.local, 16);
		__builtin_memcpy(&ip->daddr, sc->other.remote, 16);
		q->payload_len = bpf_htons(quoted_len);
		q->nexthdr = IPPROTO_TCP;
		q->hop_limit = 64;
		__builtin_memcpy(&q->saddr, sc->other.remote, 16);
		__builtin_memcpy(&q->daddr, sc->other.local, 16);
		icmp = (void *)sc->new + 40;
		icmp->type = ICMP6_TOO_BIG;
		icmp->mtu4 = bpf_htons(mtu);
		segment = (void *)sc->old + 40;
	}
	segment[0] = (__u32)sc->other.rport | (__u32)sc->other.lport << 16;
	segment[1] = bpf_htonl(sc->s.seq);
	if (v4) {
		icmp->check = sum_to_check(bpf_csum_diff(0, 0, (void *)sc->new + 20, 36, 0));
	} else {
		__be32 pseudo[2] = { bpf_htonl(8 + 40 + 8), bpf_htonl(IPPROTO_ICMPV6) };
		__s64 sum = bpf_csum_diff(0, 0, (void *)sc->new + 8, 40, 0); /* addresses, and the ICMP header */

		sum = bpf_csum_diff(0, 0, (void *)pseudo, 8, sum);
		icmp->check = sum_to_check(bpf_csum_diff(0, 0, (void *)sc->old, 48, sum));
	}
	if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, v4 ? 56 : 48, BPF_F_RECOMPUTE_CSUM))
		return -1;
	return v4 ? 0 : bpf_skb_store_bytes(skb, ETH_LEN + 48, sc->old, 48, BPF_F_RECOMPUTE_CSUM);
}

/* Record the largest payload that passes a router on the way to the leg's host: for a switch, where make_fit() cuts off more,
 * and for the next splice. */
static __always_inline void learn_mtu(struct leg *l, const struct scratch *sc, __u32 mtu)
{
	__u32 used = sc->v6 ? 60 : 40;

	if (mtu > used && mtu - used < l->mss_in)
		l->mss_in = mtu - used;
}

/* Pass an error to the leg's socket, with the sequence number that the socket has used. Its address may not be ours. */
static __always_inline int tell_socket(struct __sk_buff *skb, const struct scratch *sc, const struct leg *l, __u32 seq)
{
	__be32 from = bpf_htonl(seq), to = bpf_htonl(seq - l->shim_out);

	if (l->flags & LEG_TRANSPARENT)
		skb->mark = MARK_TRANSPARENT;
	if (from == to)
		return TCX_NEXT;
	/* The sequence number in the quoted segment, behind two IP headers and the ICMP header. */
	if (bpf_skb_store_bytes(skb, ETH_LEN + 2 * sc->ihl + 8 + 4, &to, 4, 0) ||
	    bpf_l4_csum_replace(skb, ETH_LEN + sc->ihl + 2, from, to, 4))
		return drop(V_REWRITE_FAILED);
	return TCX_NEXT;
}

/* Handle an ICMP error from the network. "Too big" about a forwarded segment goes to the host that sent the segment, in the
 * address family and numbers of its connection. If an IPv4 host would learn of less than LEAST_TOLD, or of no number, which makes
 * Linux assume 552, it is not told, and the flow is taken back: then our own socket sends the segments that the router rejects,
 * and hears of it. Other errors about forwarded segments are soft errors (RFC 1122, 4.2.3.9), and
 * are dropped. The quoted segment must be in flight (RFC 5927, 4.1): only someone who has seen the segment can know its
 * number. Outside of forwarding mode, errors go to the socket. */
__noinline int translate_error(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct icmp_error *icmp;
	struct via *v = NULL;
	struct path *p, *rev;
	__u32 seq, mtu;
	struct leg *l;
	int too_big;

	if (!sc || !parse_error(skb, sc))
		return TCX_NEXT;
	icmp = (void *)sc->old;
	seq = bpf_ntohl(*(__be32 *)(sc->orig + 4));
	mtu = sc->v6 && icmp->unused ? 0xffff : bpf_ntohs(icmp->mtu4);
	too_big = sc->v6 ? icmp->type == ICMP6_TOO_BIG : icmp->code == ICMP_NEEDFRAG;
	l = bpf_map_lookup_elem(&legs, &sc->t);
	p = way_out(sc, &v);
	if (!p || !(p->word.flags & PATH_SPLICED)) {
		if (!l)
			return TCX_NEXT;
		if (too_big && !before(seq, l->ack_in) && before(seq, l->max_out))
			learn_mtu(l, sc, mtu);
		return tell_socket(skb, sc, l, seq);
	}
	rev = find_path(&sc->other);
	if (!v || !rev || sc->ttl <= 1)
		return drop(V_NO_PEER);
	if (!too_big)
		return drop(V_ICMP_TRANSLATED);
	if (before(seq, p->max_ack) || !before(seq, rev->word.end + rev->seq_add))
		return drop(V_OUT_OF_WINDOW);
	if (l)
		learn_mtu(l, sc, mtu);
	sc->s.seq = seq + p->ack_add;
	sc->s.len = sc->v6 ? bpf_ntohs(((struct ipv6hdr *)(sc->old + 8))->payload_len) :
			     bpf_ntohs(((struct iphdr *)(sc->old + 8))->tot_len) - 20;
	if (mtu && is_crossed(sc)) /* 0: the router does not say (RFC 1191, 5) */
		mtu = sc->v6 ? mtu - 20 : mtu + 20;
	if (mtu < LEAST_TOLD) {
		if (tuple_is_v4(&sc->other)) {
			count(V_ICMP_TRANSLATED);
			if (is_due(&sc->other, ANSWER_NARROW))
				tell(&sc->other, EVENT_NARROW);
			return TCX_DROP;
		}
		mtu = LEAST_TOLD;
	}
	is_due(&sc->other, ANSWER_TOO_BIG);
	if (write_too_big(skb, mtu) || bpf_skb_store_bytes(skb, 0, v->dmac, 12, 0))
		return drop(V_REWRITE_FAILED);
	count(V_ICMP_TRANSLATED);
	return leave_by(v);
}

#endif
