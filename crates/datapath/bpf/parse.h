/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Read the tuple and the header fields of a packet into the scratch record. */
#ifndef LONGSPLICE_PARSE_H
#define LONGSPLICE_PARSE_H

#include "ecn.h"
#include "maps.h"
#include <bpf/bpf_endian.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#define ETH_LEN 14
#define TCP_CSUM_AT 16 /* in the TCP header */

/* Limit an offset to 63, so that the verifier knows its range. Accesses a few bytes further stay in the scratch record. */
static __always_inline __u32 cap(__u32 offset)
{
	asm volatile("%0 &= 63" : "+r"(offset));
	return offset;
}

/* ::ffff:0:0/96 */
#define MAPPED_PREFIX bpf_htonl(0x0000ffff)

static __always_inline int tuple_is_v4(const struct tuple *t)
{
	return t->remote[0] == 0 && t->remote[1] == 0 && t->remote[2] == MAPPED_PREFIX;
}

static __always_inline void tuple_from4(struct tuple *t, __u32 remote, __u32 local)
{
	t->remote[0] = t->remote[1] = 0;
	t->remote[2] = MAPPED_PREFIX;
	t->remote[3] = remote;
	t->local[0] = t->local[1] = 0;
	t->local[2] = MAPPED_PREFIX;
	t->local[3] = local;
}

/* The change of a one's complement sum when a word changes (RFC 1624). */
static __always_inline __u64 delta(__u32 from, __u32 to)
{
	return (__u64)(__u32)~from + to;
}

/* Fold a one's complement sum to 16 bits. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* Return the enum listens of a destination, or 0 if nothing listens there. Overwrites the key. */
static __always_inline __u32 listens_at(struct listen_key *k)
{
	__u32 class = bpf_ntohs(k->port) % PORT_CLASSES, *any = bpf_map_lookup_elem(&listened_ports, &class), *found;

	if (!any || !*any)
		return 0;
	found = bpf_map_lookup_elem(&listeners, k);
	if (!found) {
		__builtin_memset(k->local, 0, 16);
		found = bpf_map_lookup_elem(&listeners, k);
	}
	return found ? *found : 0;
}

/* The hop-by-hop header with a jumbo payload option (RFC 2675, 2) that Linux, before 7.0, puts between the headers of IPv6 and
 * TCP, if a super-packet has a payload of more than 65535 bytes (BIG TCP). It is removed before the packet reaches a wire. */
struct jumbo {
	__u8 next, length, option, option_length;
	__be32 payload; /* with this header, bytes */
};
#define JUMBO_OPTION 0xc2

/* What parse() has found. */
enum parsed {
	PARSED_TCP = 0,
	PARSED_FRAGMENT = 1,  /* a first fragment with the whole TCP header */
	PARSED_EXTENSION = 2, /* a whole segment behind an IPv6 extension header: not forwarded */
	PARSED_TINY = 3,      /* a first fragment with the ports, but not the whole TCP header */
	PARSED_LATER = 4,     /* a later fragment: addresses and identification only */
	PARSED_OTHER = 5,     /* anything else, or damaged */
};

static __always_inline int ip_sum_right(struct __sk_buff *skb, struct scratch *sc)
{
	__u32 n = cap(sc->ihl) & 60;

	if (n < 20 || bpf_skb_load_bytes(skb, ETH_LEN, sc->old, n))
		return 0;
	return fold(bpf_csum_diff(0, 0, (void *)sc->old, n, 0)) == 0xffff;
}

/* Parse a TCP segment behind one IPv6 extension header (RFC 8200, 4). Only behind a fragment header segments are forwarded,
 * but a leg that receives others must be marked (LEG_FRAGMENTS). */
static __always_inline enum parsed tcp_behind_extension(struct __sk_buff *skb, struct scratch *sc, __u8 kind)
{
	__u8 h[8]; /* next header; length - 1, in units of 8 bytes; fragment header: offset, M flag, identification */

	if ((kind != 0 && kind != 43 && kind != 44 && kind != 60) || bpf_skb_load_bytes(skb, ETH_LEN + 40, h, 8) ||
	    h[0] != IPPROTO_TCP)
		return PARSED_OTHER;
	if (kind == 0 && h[1] == 0 && h[2] == JUMBO_OPTION && skb->gso_size && !((struct ipv6hdr *)sc->l3)->payload_len) {
		sc->jumbo = 1;
		sc->ihl += sizeof(struct jumbo);
		((struct ipv6hdr *)sc->l3)->nexthdr = IPPROTO_TCP; /* as on the wire */
		return PARSED_TCP;
	}
	sc->fragment = 1;
	if (kind == 44) {
		sc->ihl += 8;
		sc->frag_at = (__u16)h[2] << 8 | (h[3] & 0xf8);
		sc->more = h[3] & 1;
		__builtin_memcpy(&sc->frag_id, h + 4, 4);
		return PARSED_FRAGMENT;
	}
	if (h[1] > 20)
		return PARSED_OTHER;
	sc->ihl += (h[1] + 1) * 8;
	return PARSED_EXTENSION;
}

/* Read everything but the TCP options. The headers are copied, so this is for the general way and for packets without an
 * entry. */
static __always_inline int parse(struct __sk_buff *skb, struct scratch *sc, int egress)
{
	struct tcphdr *th = (void *)sc->orig;
	__u16 frag, total;
	__u32 l4;
	int r = PARSED_TCP;

	sc->egress = egress;
	sc->traced = sc->verdicts = 0;
	sc->fragment = sc->more = sc->frag_at = sc->transparent = sc->end_to_end = sc->jumbo = 0;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)sc->l3;

		if (bpf_skb_load_bytes(skb, ETH_LEN, ip, sizeof(*ip)) || ip->protocol != IPPROTO_TCP || ip->version != 4)
			return PARSED_OTHER;
		frag = bpf_ntohs(ip->frag_off);
		if (frag & 0x3fff) {
			sc->fragment = 1;
			sc->frag_at = (frag & 0x1fff) * 8;
			sc->more = !!(frag & 0x2000);
			sc->frag_id = ip->id;
			r = PARSED_FRAGMENT;
		}
		sc->v6 = 0;
		sc->s.ecn = ip->tos & ECN_BITS;
		sc->ihl = ip->ihl * 4;
		/* A rewrite would repair a broken header (RFC 1812, 5.2.2). */
		if (!egress && !ip_sum_right(skb, sc))
			return PARSED_OTHER;
		sc->ttl = ip->ttl;
		total = bpf_ntohs(ip->tot_len);
		if (!total && !skb->gso_size)
			return PARSED_OTHER;
		sc->pkt_len = total ? total : skb->len - ETH_LEN; /* 0: BIG TCP */
		if (egress)
			tuple_from4(&sc->t, ip->daddr, ip->saddr);
		else
			tuple_from4(&sc->t, ip->saddr, ip->daddr);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip6 = (void *)sc->l3;

		if (bpf_skb_load_bytes(skb, ETH_LEN, ip6, sizeof(*ip6)) || ip6->version != 6)
			return PARSED_OTHER;
		sc->v6 = 1;
		sc->s.ecn = sc->l3[1] >> 4 & ECN_BITS;
		sc->ihl = sizeof(*ip6);
		if (ip6->nexthdr != IPPROTO_TCP) {
			r = tcp_behind_extension(skb, sc, ip6->nexthdr);
			if (r == PARSED_OTHER)
				return r;
		}
		sc->ttl = ip6->hop_limit;
		total = bpf_ntohs(ip6->payload_len);
		if (!total && !skb->gso_size)
			return PARSED_OTHER;
		sc->pkt_len = total ? total + sizeof(*ip6) : skb->len - ETH_LEN; /* 0: BIG TCP */
		if (egress) {
			__builtin_memcpy(sc->t.remote, &ip6->daddr, 16);
			__builtin_memcpy(sc->t.local, &ip6->saddr, 16);
		} else {
			__builtin_memcpy(sc->t.remote, &ip6->saddr, 16);
			__builtin_memcpy(sc->t.local, &ip6->daddr, 16);
		}
	} else {
		return PARSED_OTHER;
	}
	l4 = ETH_LEN + sc->ihl;
	if (sc->ihl < 20 || sc->pkt_len > skb->len - ETH_LEN)
		return PARSED_OTHER;
	if (sc->frag_at)
		return sc->pkt_len > sc->ihl ? PARSED_LATER : PARSED_OTHER;
	if (r == PARSED_FRAGMENT && sc->pkt_len < sc->ihl + sizeof(*th)) {
		if (sc->pkt_len < (__u32)sc->ihl + 4 || bpf_skb_load_bytes(skb, l4, th, 4))
			return PARSED_OTHER;
		r = PARSED_TINY;
	} else if (bpf_skb_load_bytes(skb, l4, th, sizeof(*th))) {
		return PARSED_OTHER;
	}
	sc->t.rport = egress ? th->dest : th->source;
	sc->t.lport = egress ? th->source : th->dest;
	if (r == PARSED_TINY)
		return r;
	sc->doff = th->doff * 4;
	if (sc->doff < sizeof(*th))
		return PARSED_OTHER;
	if (sc->pkt_len < (__u32)sc->ihl + sc->doff)
		return r == PARSED_FRAGMENT ? PARSED_TINY : PARSED_OTHER;
	sc->s.seq = bpf_ntohl(th->seq);
	sc->s.ack = bpf_ntohl(th->ack_seq);
	sc->s.win = bpf_ntohs(th->window);
	sc->s.urg = bpf_ntohs(th->urg_ptr);
	sc->s.flags = sc->orig[13];
	sc->s.len = sc->came = sc->pkt_len - sc->ihl - sc->doff;
	return r;
}

/* Read the TCP options (RFC 9293, 3.2). A global function, so that the verifier checks it once. The cursor is in map memory to
 * keep the verifier's state of the loop small. */
__noinline int parse_options(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__u32 n, l4;
	int i;

	if (!sc)
		return 0;
	sc->ts_at = sc->sack_at = sc->sack_len = 0;
	sc->s.has_ts = 0;
	n = sc->doff;
	if (n <= 20 || n > MAX_TCP_HDR)
		return 0;
	l4 = ETH_LEN + sc->ihl;
	n = cap(n - 21) + 1; /* before Linux 6.8, the verifier learns nothing from a comparison with 0 */
	if (n > 40 || bpf_skb_load_bytes(skb, l4 + 20, sc->orig + 20, n))
		return 0;
	sc->cursor = 20;
	bpf_for(i, 0, 40) {
		__u32 at = sc->cursor;
		__u32 kind, len;

		if (at >= sc->doff || at >= MAX_TCP_HDR)
			break;
		at = cap(at);
		kind = sc->orig[at];
		if (kind == 0)
			break;
		if (kind == 1) {
			sc->cursor = at + 1;
			continue;
		}
		len = sc->orig[at + 1];
		if (len < 2 || at + len > sc->doff)
			break;
		if (kind == 8 && len == 10)
			sc->ts_at = at;
		if (kind == 5 && len >= 10 && len <= 34) {
			sc->sack_at = at;
			sc->sack_len = len;
		}
		sc->cursor = at + len;
	}
	if (sc->ts_at && sc->ts_at <= 50) {
		__u32 at = cap(sc->ts_at), v;

		__builtin_memcpy(&v, sc->orig + at + 2, 4);
		sc->s.tsval = bpf_ntohl(v);
		__builtin_memcpy(&v, sc->orig + at + 6, 4);
		sc->s.tsecr = bpf_ntohl(v);
		sc->s.has_ts = 1;
	}
	return 0;
}

#endif
