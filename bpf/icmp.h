/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Path MTU (RFC 1191, RFC 8201) across a splice. A segment that does not fit is answered as a router would; an error that a
 * router sends about a forwarded segment concerns its first sender, who knows the connection by other numbers. */
#ifndef LONGSPLICE_ICMP_H
#define LONGSPLICE_ICMP_H

#define ICMP_UNREACH 3
#define ICMP_NEEDFRAG 4
#define ICMP6_TOO_BIG 2

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

/* Checksum of what an error quotes: IP header and 20 bytes of TCP header. A segment whose checksum the device still has to
 * fill in will have one then that makes the header's sum the complement of what the field held. */
static __always_inline __s64 sum_quoted(struct __sk_buff *skb, struct scratch *sc, __s64 sum)
{
	sum = sc->v6 ? bpf_csum_diff(0, 0, (void *)sc->l3, 40, sum) : bpf_csum_diff(0, 0, (void *)sc->l3, 20, sum);
	if (summed(skb) == SUMMED_PARTIAL) {
		__u32 k = (__u16)~*(__u16 *)(sc->orig + TCP_CSUM_AT);

		return bpf_csum_diff(0, 0, (void *)&k, 4, sum);
	}
	return bpf_csum_diff(0, 0, (void *)sc->orig, 20, sum);
}

/* Turns the packet into "too big" for its sender; mtu: bytes of an IP packet of the sender's family. */
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
	if (sc->ihl != l3 || !may_answer(&sc->t, ANSWER_TOO_BIG))
		return TCX_DROP;
	if (bpf_skb_load_bytes(skb, 0, sc->mac, 12) ||
	    bpf_skb_change_tail(skb, ETH_LEN + l3 + 20, 0) || bpf_skb_adjust_room(skb, l3 + 8, BPF_ADJ_ROOM_MAC, 0))
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

/* The sender's MTU for a way out of `mtu` bytes, when the families differ: headers grow and shrink by 20 bytes. */
static __always_inline __u32 mtu_for_sender(const struct scratch *sc, __u32 mtu)
{
	int out4 = tuple_is_v4(&sc->other);

	if (sc->v6 && out4)
		return mtu + 20;
	if (!sc->v6 && !out4)
		return mtu - 20;
	return mtu;
}

/* An error from the network about a segment that we forwarded on the leg `sc->t`: it goes to the host of the other leg, in
 * that connection's numbers. IPv4 to IPv4 only: across families the other leg's own packets find the MTU.
 * Layout: IP 20, ICMP 8, quoted IP 20, quoted TCP 8 or more. */
__noinline int translate_error(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct tuple4 k;
	struct path4 *p;
	struct iphdr *ip, *q;
	struct via *v;
	__u32 via, diff_from[4];
	__be32 seq;
	__s64 diff;

	if (!sc || bpf_skb_load_bytes(skb, ETH_LEN, sc->old, 64))
		return TCX_NEXT;
	ip = (void *)sc->old;
	q = (void *)sc->old + 28;
	if (sc->old[0] != 0x45 || ip->protocol != IPPROTO_ICMP || sc->old[20] != ICMP_UNREACH || sc->old[28] != 0x45 ||
	    q->protocol != IPPROTO_TCP || q->frag_off & bpf_htons(0x1fff))
		return TCX_NEXT;
	/* the quoted segment left from our address for the host */
	k.local = q->saddr;
	k.remote = q->daddr;
	__builtin_memcpy(&k.lport, sc->old + 48, 2);
	__builtin_memcpy(&k.rport, sc->old + 50, 2);
	__builtin_memcpy(&seq, sc->old + 52, 4);
	p = find4(&k);
	if (!p || !(p->p.word.flags & PATH_SPLICED))
		return TCX_NEXT;
	via = path_index(&p->p);
	v = bpf_map_lookup_elem(&vias, &via);
	if (!v || ip->ttl <= 1 || p->p.word.flags & PATH_CROSS)
		return drop(V_NO_PEER);
	if (sc->old[21] != ICMP_NEEDFRAG)
		return drop(V_ICMP_TRANSLATED); /* soft errors change nothing in an established connection (RFC 1122, 4.2.3.9) */
	__builtin_memcpy(diff_from, &q->saddr, 8);
	__builtin_memcpy(diff_from + 2, sc->old + 48, 8);
	q->saddr = p->p.remote4;
	q->daddr = v->local[3];
	__builtin_memcpy(sc->old + 48, &p->p.rport, 2);
	__builtin_memcpy(sc->old + 50, &p->p.lport, 2);
	seq = bpf_htonl(bpf_ntohl(seq) + p->p.ack_add);
	__builtin_memcpy(sc->old + 52, &seq, 4);
	/* the quoted header's own checksum follows its addresses, which leaves the sum over both unchanged */
	diff = bpf_csum_diff(diff_from, 8, (void *)&q->saddr, 8, 0);
	q->check = ~fold((__u64)diff + (__u16)~q->check);
	diff = bpf_csum_diff(diff_from + 2, 8, (void *)sc->old + 48, 8, 0);
	ip->ttl--;
	ip->saddr = v->local[3];
	ip->daddr = p->p.remote4;
	ip->check = 0;
	ip->check = sum_to_check(bpf_csum_diff(0, 0, (void *)ip, 20, 0));
	if (bpf_skb_store_bytes(skb, ETH_LEN, sc->old, 56, 0) || bpf_l4_csum_replace(skb, ETH_LEN + 22, 0, diff, 0) ||
	    bpf_skb_store_bytes(skb, 0, v->dmac, 12, 0))
		return drop(V_REWRITE_FAILED);
	count(V_ICMP_TRANSLATED);
	return leave_by(v);
}

#endif
