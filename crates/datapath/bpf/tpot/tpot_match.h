/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translucent proxying: which SYNs are meant. Packets are parsed, the option is found, and destinations are compared with rules.
 * Proxies and hosts (tpot.bpf.c) and routers of farms (tpot_router.bpf.c) share this. */
#ifndef LONGSPLICE_TPOT_MATCH_H
#define LONGSPLICE_TPOT_MATCH_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include "tpot.h"

const volatile enum tpot_constant constant_layout;
const volatile enum tpot_rule_kind rule_kind_layout;

#define L3 ETH_HLEN
#define TH_FIN 0x01
#define TH_SYN 0x02
#define TH_RST 0x04
#define TH_ACK 0x10

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TPOT_PLACES);
	__type(key, __u32);
	__type(value, struct tpot_rule);
} tpot_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tpot_config);
} tpot_config SEC(".maps");

/* The options of a segment with SYN. */
struct options {
	__u8 bytes[64];
	__u32 cursor;
	__u32 mss;      /* offset of the value in the options; 0: none */
	__u32 size;     /* of our option; 0: none. Only an answer may have the longer one */
	__u32 at;       /* where it is */
	__u32 hops;     /* of our option */
	__u32 capabilities; /* of our option, enum tpot_capability */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct options);
} tpot_scratch SEC(".maps");

/* An IP packet, and the TCP segment or the IP packet in it. */
struct packet {
	struct tuple t;
	__u32 l3, l4;  /* offsets from the frame's start, bytes */
	__u32 l3_len;  /* IP header, bytes */
	__u8 v6, proto, tos, flags, doff; /* doff: bytes */
	__u32 seq, ack;
};

static __always_inline int same(const __u32 *a, const __u32 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

static __always_inline void mapped(__u32 *to, __u32 v4)
{
	to[0] = to[1] = 0;
	to[2] = bpf_htonl(0xffff);
	to[3] = v4;
}

/* Bytes of a tunnel's headers. */
static __always_inline __u32 tunnel_len(int v6, int udp)
{
	return (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + (udp ? sizeof(struct udphdr) : 0);
}

/* Where the tunnelled packet is. */
static __always_inline __u32 inner_at(const struct packet *outer)
{
	return outer->l4 + (outer->proto == IPPROTO_UDP ? sizeof(struct udphdr) : 0);
}

/* Is this the UDP header of a tunnel? Whatever is configured now: connections stay in their tunnels. */
static __always_inline int is_tunnel_udp(struct __sk_buff *skb, __u32 at)
{
	__u16 dest;

	return !bpf_skb_load_bytes(skb, at + offsetof(struct udphdr, dest), &dest, 2) && dest == bpf_htons(TPOT_UDP_PORT);
}

/* Parse the IP header at l3 and the TCP header behind it, if there is one. out: our side is the source. Returns 0 for packets
 * that have no place here: other protocols, fragments, IP options and extension headers. A tunnelled packet yields its outer
 * addresses, and its protocol. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p, __u32 l3, int v6, int out)
{
	struct tcphdr th;

	p->l3 = l3;
	p->v6 = v6;
	if (v6) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, l3, &ip, sizeof(ip)) || ip.version != 6)
			return 0;
		p->l3_len = sizeof(ip);
		p->proto = ip.nexthdr;
		p->tos = ip.priority << 4 | ip.flow_lbl[0] >> 4;
		__builtin_memcpy(out ? p->t.remote : p->t.local, &ip.daddr, 16);
		__builtin_memcpy(out ? p->t.local : p->t.remote, &ip.saddr, 16);
	} else {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, l3, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl != 5 ||
		    ip.frag_off & bpf_htons(0x3fff))
			return 0;
		p->l3_len = sizeof(ip);
		p->proto = ip.protocol;
		p->tos = ip.tos;
		mapped(out ? p->t.remote : p->t.local, ip.daddr);
		mapped(out ? p->t.local : p->t.remote, ip.saddr);
	}
	p->l4 = l3 + p->l3_len;
	if (p->proto == IPPROTO_UDP)
		return is_tunnel_udp(skb, p->l4);
	if (p->proto != IPPROTO_TCP)
		return p->proto == (v6 ? IPPROTO_IPV6 : IPPROTO_IPIP) || p->proto == (v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
	if (bpf_skb_load_bytes(skb, p->l4, &th, sizeof(th)))
		return 0;
	p->t.rport = out ? th.dest : th.source;
	p->t.lport = out ? th.source : th.dest;
	p->flags = ((__u8 *)&th)[13];
	p->doff = th.doff * 4;
	p->seq = bpf_ntohl(th.seq);
	p->ack = bpf_ntohl(th.ack_seq);
	return p->doff >= 20;
}

/* Parse the outermost IP packet. */
static __always_inline int parse_frame(struct __sk_buff *skb, struct packet *p, int out)
{
	if (skb->vlan_present) /* the VLAN device shows it to us without its tag */
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse(skb, p, L3, 0, out);
	return skb->protocol == bpf_htons(ETH_P_IPV6) && parse(skb, p, L3, 1, out);
}

static __always_inline struct options *options(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&tpot_scratch, &zero);
}

static __always_inline struct tpot_config *configured(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&tpot_config, &zero);
}

/* Return the index of the first rule of this kind for the remote address and port, plus 1; 0: none. A global function, so that
 * the verifier checks its loop once. */
__noinline int rule_for(__u32 kind, const struct tuple *t)
{
	struct tpot_config *c = configured();
	__u32 i, rules, first;
	int k, v4;

	if (!c || !t)
		return 0;
	rules = *(volatile __u32 *)&c->rules; /* both halves of one value */
	first = rules >> 16;
	rules &= 0xffff;
	v4 = !t->remote[0] && !t->remote[1] && t->remote[2] == bpf_htonl(0xffff);
	bpf_for(k, 0, TPOT_RULES) {
		struct tpot_rule *r;
		__u16 port = bpf_ntohs(t->rport);

		if (k >= rules)
			return 0;
		i = first + k;
		r = bpf_map_lookup_elem(&tpot_rules, &i);
		if (!r || r->kind != kind || port < r->low || port > r->high)
			continue;
		if (v4 && r->mask[2] != 0xffffffff) /* ::/0 is not about IPv4 */
			continue;
		if ((t->remote[0] & r->mask[0]) == r->net[0] && (t->remote[1] & r->mask[1]) == r->net[1] &&
		    (t->remote[2] & r->mask[2]) == r->net[2] && (t->remote[3] & r->mask[3]) == r->net[3])
			return i + 1;
	}
	return 0;
}

/* Read the options of a segment with SYN into the scratch space. Returns 0 if they are malformed. The cursor is there as well:
 * the verifier does not follow values in maps, so its work does not grow with each round. */
__noinline int find_options(struct __sk_buff *skb, __u32 at, __u32 len)
{
	struct options *o = options();
	struct tpot_config *c = configured();
	int i;

	if (!o || !c)
		return 0;
	o->cursor = o->mss = o->size = 0;
	if (!len)
		return 1;
	len = ((len - 1) & 63) + 1; /* before Linux 6.8, the verifier learns nothing from a comparison with 0 */
	if (len > 40 || bpf_skb_load_bytes(skb, at, o->bytes, len))
		return 0;
	bpf_for(i, 0, 40) {
		__u32 n = o->cursor & 63, kind, size;

		if (n >= len)
			return 1;
		kind = o->bytes[n];
		size = o->bytes[(n + 1) & 63];
		if (!kind)
			return 1;
		if (kind == 1) {
			o->cursor = n + 1;
			continue;
		}
		if (size < 2 || n + size > len)
			return 0;
		if (kind == 2 && size == 4)
			o->mss = n + 2;
		if (kind == TPOT_KIND && (size == sizeof(struct tpot_option) || size == sizeof(struct tpot_answer)) &&
		    o->bytes[(n + 2) & 63] == c->exid >> 8 && o->bytes[(n + 3) & 63] == (c->exid & 0xff) &&
		    o->bytes[(n + 4) & 63] == TPOT_VERSION) {
			o->size = size;
			o->at = n;
			o->hops = o->bytes[(n + 5) & 63];
			o->capabilities = o->bytes[(n + 6) & 63] << 8 | o->bytes[(n + 7) & 63];
		}
		o->cursor = n + size;
	}
	return 1;
}

static __always_inline struct options *read_options(struct __sk_buff *skb, const struct packet *p)
{
	return find_options(skb, p->l4 + 20, p->doff - 20) ? options() : NULL;
}

#endif
