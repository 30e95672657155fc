// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Translucent proxying: the option of SYNs and SYN-ACKs, and the tunnels between asker and taker (tpot.h).
 *
 * These programs see packets before `ingress` and after `egress` of splice.bpf.c. So the data path, sockets included, has to do
 * with inner packets only, whatever it does with a connection: copy, splice, unsplice.
 */
#include <asm-generic/errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include "tpot.h"
#include "mark.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

const volatile enum tpot_constant constant_layout;
const volatile enum tpot_role role_layout;
const volatile enum tpot_rule_kind rule_kind_layout;
const volatile enum tpot_tunnel_flag flag_layout;
const volatile enum tpot_verdict verdict_layout;

#define L3 ETH_HLEN
#define SECOND 1000000000ull
#define TH_FIN 0x01
#define TH_SYN 0x02
#define TH_RST 0x04
#define TH_ACK 0x10
#define ECN_BITS 3
#define ECN_CE 3
/* SYNs of a connection that carry the option. Something on the path may drop segments with it (TP 2.4). */
#define ASK_TIMES 2
#define TTL 64 /* of the outer header */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TPOT_SYNS);
	__type(key, struct tuple);
	__type(value, struct tpot_syn);
} tpot_syns SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, TPOT_TUNNELS);
	__type(key, struct tuple);
	__type(value, struct tpot_tunnel);
} tpot_tunnels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TPOT_RULES);
	__type(key, __u32);
	__type(value, struct tpot_rule);
} tpot_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tpot_config);
} tpot_config SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TPOT_ADDRESSES);
	__type(key, __u32);
	__type(value, struct tpot_own);
} tpot_own SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TPOT_ADDRESSES);
	__type(key, struct tpot_address);
	__type(value, __u32);
} tpot_addresses SEC(".maps");

/* Destinations that have only answered SYNs without the option, and when, ns, CLOCK_MONOTONIC. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TPOT_AVOIDED);
	__type(key, struct tpot_address);
	__type(value, __u64);
} tpot_avoided SEC(".maps");

/* The listening sockets for intercepted connections, by the index of their rule. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, TPOT_RULES);
	__type(key, __u32);
	__type(value, __u64);
} tpot_listeners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, T_MAX);
	__type(key, __u32);
	__type(value, __u64);
} tpot_verdicts SEC(".maps");

/* The options of a segment with SYN. */
struct options {
	__u8 bytes[64];
	__u32 cursor;
	__u32 mss;      /* offset of the value in the options; 0: none */
	__u32 asks;     /* the segment has our option */
	__u32 hops;     /* of our option */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct options);
} tpot_scratch SEC(".maps");

/* An IP packet, and the TCP segment in it. */
struct packet {
	struct tuple t;
	__u32 l3, l4;  /* offsets from the frame's start, bytes */
	__u32 l3_len;  /* IP header, bytes */
	__u8 v6, proto, tos, flags, doff; /* doff: bytes */
	__u32 seq, ack;
};

static __always_inline void count(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&tpot_verdicts, &verdict);

	if (n)
		(*n)++;
}

static __always_inline int drop(__u32 verdict)
{
	count(verdict);
	return TCX_DROP;
}

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
	__u32 i;
	int k;

	if (!c || !t)
		return 0;
	bpf_for(k, 0, TPOT_RULES) {
		struct tpot_rule *r;
		__u16 port = bpf_ntohs(t->rport);

		i = k;
		if (i >= c->rules)
			return 0;
		r = bpf_map_lookup_elem(&tpot_rules, &i);
		if (!r || r->kind != kind || port < r->low || port > r->high)
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
	o->cursor = o->mss = o->asks = 0;
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
		if (kind == TPOT_KIND && size == sizeof(struct tpot_option) && o->bytes[(n + 2) & 63] == c->exid >> 8 &&
		    o->bytes[(n + 3) & 63] == (c->exid & 0xff) && o->bytes[(n + 4) & 63] == TPOT_VERSION) {
			o->asks = 1;
			o->hops = o->bytes[(n + 5) & 63];
		}
		o->cursor = n + size;
	}
	return 1;
}

static __always_inline struct options *read_options(struct __sk_buff *skb, const struct packet *p)
{
	return find_options(skb, p->l4 + 20, p->doff - 20) ? options() : NULL;
}

/* Lower the MSS by the tunnel's header: the receiver of this SYN or SYN-ACK must leave room for it. */
static __always_inline int shrink_mss(struct __sk_buff *skb, const struct packet *p, const struct options *o)
{
	__u32 at = o->mss, check = p->l4 + 16;
	__u16 old, new;

	if (!at || at > 38)
		return 0;
	old = o->bytes[at & 63] << 8 | o->bytes[(at + 1) & 63];
	if (old < 256 + p->l3_len) /* no path is so narrow: a mistake or an attack, and no reason to make it worse */
		return 0;
	new = bpf_htons(old - p->l3_len);
	old = bpf_htons(old);
	if (bpf_skb_store_bytes(skb, p->l4 + 20 + at, &new, 2, 0))
		return -1;
	if (at & 1) /* the sum's words do not begin where the value does */
		return bpf_l4_csum_replace(skb, check, __builtin_bswap16(old), __builtin_bswap16(new), 2);
	return bpf_l4_csum_replace(skb, check, old, new, 2);
}

/* Fold a sum, and complement it. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* The sum of an IPv4 header without options. */
static __always_inline __u16 header_sum(struct iphdr *ip)
{
	return fold(bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

/* Set the length of the IP packet: `len` bytes follow the header. */
static __always_inline int set_length(struct __sk_buff *skb, const struct packet *p, __u32 len)
{
	__u16 old, new = bpf_htons(p->v6 ? len : len + p->l3_len);
	__u32 at = p->l3 + (p->v6 ? 4 : 2);

	if (bpf_skb_load_bytes(skb, at, &old, 2) || bpf_skb_store_bytes(skb, at, &new, 2, 0))
		return -1;
	return p->v6 ? 0 : bpf_l3_csum_replace(skb, p->l3 + 10, old, new, 2);
}

/* Append our option to a SYN or SYN-ACK. Returns 0 if it is there, 1 if it does not fit, and below 0 on errors, after which the
 * packet may be damaged. */
static __always_inline int append_option(struct __sk_buff *skb, const struct packet *p, __u8 hops)
{
	struct tpot_config *c = configured();
	__u32 end = p->l4 + p->doff, size = sizeof(struct tpot_option), check = p->l4 + 16;
	__u16 old, new;
	__s64 sum;

	if (!c || p->doff + size > 60 || skb->len != end) /* data: TCP fast open */
		return 1;
	struct tpot_option o = {
		.kind = TPOT_KIND, .length = size, .exid = bpf_htons(c->exid), .version = TPOT_VERSION, .hops = hops,
	};
	if (bpf_skb_change_tail(skb, end + size, 0) || bpf_skb_store_bytes(skb, end, &o, size, 0))
		return -1;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&o, size, 0);
	if (sum < 0 || bpf_l4_csum_replace(skb, check, 0, sum, 0))
		return -1;
	/* the length in the pseudo-header, then the data offset */
	if (bpf_l4_csum_replace(skb, check, bpf_htons(p->doff), bpf_htons(p->doff + size), 2 | BPF_F_PSEUDO_HDR))
		return -1;
	if (bpf_skb_load_bytes(skb, p->l4 + 12, &old, 2))
		return -1;
	new = (old & bpf_htons(0x0fff)) | bpf_htons((p->doff + size) << 10);
	if (bpf_skb_store_bytes(skb, p->l4 + 12, &new, 2, 0) || bpf_l4_csum_replace(skb, check, old, new, 2))
		return -1;
	return set_length(skb, p, p->doff + size);
}

static __always_inline __u64 now(void)
{
	return bpf_ktime_get_coarse_ns();
}

/* Note a packet of a connection in its tunnel. Written to about once a second, since all processors share the entry. */
static __always_inline void note(struct tpot_tunnel *tn, const struct packet *p, __u32 fin)
{
	__u64 at = now();

	if (at - tn->seen > SECOND)
		tn->seen = at;
	if (p->flags & (TH_FIN | TH_RST))
		__sync_fetch_and_or(&tn->flags, (p->flags & TH_FIN ? fin : 0) | (p->flags & TH_RST ? TPOT_RST : 0));
}

static __always_inline int is_over(const struct tpot_tunnel *tn)
{
	return tn->flags & TPOT_RST || (tn->flags & (TPOT_FIN_IN | TPOT_FIN_OUT)) == (TPOT_FIN_IN | TPOT_FIN_OUT);
}

/* ---- packets that arrive ---- */

/* Give a packet for an address that is not ours to our socket: `ingress` of splice.bpf.c, which sees it next, leaves the mark
 * that the routing rule knows. */
static __always_inline int deliver(struct __sk_buff *skb)
{
	skb->mark = MARK_TAKEN;
	return TCX_NEXT;
}

/* Give the packet to the listening socket of a rule. Returns 0 if there is one. */
static __always_inline int assign(struct __sk_buff *skb, __u32 rule)
{
	struct bpf_sock *sk = bpf_map_lookup_elem(&tpot_listeners, &rule);
	int r;

	if (!sk)
		return -1;
	r = bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	return r;
}

/* Is there a socket, or a request of one, for this connection? Not a listening one: its address may be any, and its port the
 * server's. struct tuple and struct tuple4 have the layout of struct bpf_sock_tuple. */
static __always_inline int has_socket(struct __sk_buff *skb, const struct packet *p)
{
	struct tuple4 k = { p->t.remote[3], p->t.local[3], p->t.rport, p->t.lport };
	struct bpf_sock *sk;
	__u32 state;

	if (p->v6)
		sk = bpf_skc_lookup_tcp(skb, (void *)&p->t, sizeof(p->t), BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_skc_lookup_tcp(skb, (void *)&k, sizeof(k), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state != BPF_TCP_LISTEN;
}

/* A SYN with the option. */
static __always_inline int intercept(struct __sk_buff *skb, struct packet *p, struct options *o)
{
	struct tuple dest = p->t;
	struct tpot_syn syn = {}, *known;
	struct tpot_own *own;
	__u32 key = skb->ifindex, rule;

	__builtin_memcpy(dest.remote, p->t.local, 16); /* rules are about the destination */
	dest.rport = p->t.lport;
	rule = rule_for(TPOT_RULE_TAKE, &dest);
	if (!rule || !o->hops || bpf_map_lookup_elem(&tpot_addresses, p->t.local) ||
	    bpf_map_lookup_elem(&tpot_addresses, p->t.remote)) { /* our own SYN, in a loop */
		count(T_LEFT);
		return TCX_NEXT;
	}
	own = bpf_map_lookup_elem(&tpot_own, &key);
	if (!own || !(p->v6 ? own->v6[0] : own->v4[3])) {
		count(T_UNSERVED);
		return TCX_NEXT;
	}
	syn.seq = p->seq;
	syn.role = TPOT_TAKER;
	syn.hops = o->hops;
	__builtin_memcpy(syn.peer, p->t.remote, 16);
	__builtin_memcpy(syn.own, p->v6 ? own->v6 : own->v4, 16);
	known = bpf_map_lookup_elem(&tpot_syns, &p->t);
	if (known && known->seq == p->seq && known->role == TPOT_TAKER) { /* sent again */
		syn.iss = known->iss;
		syn.answered = known->answered;
	}
	syn.listener = rule - 1;
	if (bpf_map_update_elem(&tpot_syns, &p->t, &syn, BPF_ANY) || assign(skb, rule - 1)) {
		count(T_UNSERVED);
		return TCX_NEXT;
	}
	if (shrink_mss(skb, p, o))
		return drop(T_FAILED);
	count(T_INTERCEPTED);
	return deliver(skb);
}

/* Remove the outer header. The outer congestion mark goes to the inner packet (RFC 6040, 4.2). */
static __always_inline int decapsulate(struct __sk_buff *skb, const struct packet *outer, const struct packet *inner)
{
	__u64 flags = outer->v6 ? BPF_F_ADJ_ROOM_DECAP_L3_IPV6 : BPF_F_ADJ_ROOM_DECAP_L3_IPV4;
	int marked = (outer->tos & ECN_BITS) == ECN_CE;

	if (marked && !(inner->tos & ECN_BITS))
		return drop(T_CE_DROPPED);
	if (bpf_skb_adjust_room(skb, -(__s32)outer->l3_len, BPF_ADJ_ROOM_MAC, flags | BPF_F_ADJ_ROOM_FIXED_GSO))
		return drop(T_FAILED);
	if (marked)
		bpf_skb_ecn_set_ce(skb);
	count(T_DECAPSULATED);
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

/* Answer a second SYN-ACK of a connection with an RST, on the way that it came: through its tunnel, or without one. The socket's
 * own answer would take the connection's way, and would only be a challenge. The packet is turned round, and its checksum
 * updated, so it does not matter who completes that. */
static __always_inline int reset_back(struct __sk_buff *skb, const struct packet *outer, const struct packet *p)
{
	struct options *o = options();
	struct tcphdr *old = (void *)o, th = {
		.source = p->t.lport, .dest = p->t.rport, .seq = bpf_htonl(p->ack), .doff = 5, .rst = 1,
	};
	__u8 mac[12], turned[12];
	__u32 size = p->doff;
	__s64 sum;

	if (!o || size < 20 || size > 60)
		return TCX_DROP;
	size = ((size - 1) & 63) + 1;
	if (bpf_skb_load_bytes(skb, p->l4, o->bytes, size))
		return TCX_DROP;
	old->check = 0; /* updated, not compared */
	sum = bpf_csum_diff((__be32 *)o->bytes, size & 0x3c, (__be32 *)&th, sizeof(th), 0);
	if (sum < 0 || bpf_skb_load_bytes(skb, p->l4 + 16, &th.check, 2))
		return TCX_DROP;
	if (bpf_skb_change_tail(skb, p->l4 + sizeof(th), 0) || bpf_skb_store_bytes(skb, p->l4, &th, sizeof(th), 0) ||
	    bpf_l4_csum_replace(skb, p->l4 + 16, 0, sum, 0) ||
	    bpf_l4_csum_replace(skb, p->l4 + 16, bpf_htons(p->doff), bpf_htons(sizeof(th)), 2 | BPF_F_PSEUDO_HDR))
		return TCX_DROP;
	if (turn_ip(skb, p, sizeof(th)) || (outer && turn_ip(skb, outer, p->l3_len + sizeof(th))))
		return TCX_DROP;
	if (bpf_skb_load_bytes(skb, 0, mac, 12))
		return TCX_DROP;
	__builtin_memcpy(turned, mac + 6, 6);
	__builtin_memcpy(turned + 6, mac, 6);
	if (bpf_skb_store_bytes(skb, 0, turned, 12, 0))
		return TCX_DROP;
	skb->mark = MARK_PLAIN;
	count(T_SECOND_ANSWER);
	return bpf_redirect(skb->ifindex, 0);
}

/* A connection enters its tunnel. tn: what is special about it. */
static __always_inline int open_tunnel(struct __sk_buff *skb, const struct tuple *t, const __u32 *peer, const __u32 *own,
				       struct tpot_tunnel *tn)
{
	tn->ifindex = skb->ifindex;
	tn->seen = now();
	__builtin_memcpy(tn->peer, peer, 16);
	__builtin_memcpy(tn->own, own, 16);
	if (bpf_map_update_elem(&tpot_tunnels, t, tn, BPF_ANY))
		return -1;
	bpf_map_delete_elem(&tpot_syns, t);
	count(T_OPENED);
	return 0;
}

/* A tunnelled packet. Decapsulated is only what belongs to a known connection and comes from the other end of its tunnel;
 * anything else is for the stack, which may have tunnels of its own. No inner SYN ever is, so that nobody can open connections
 * in another's name. */
static __always_inline int from_tunnel(struct __sk_buff *skb, struct packet *outer)
{
	struct packet in = {};
	struct tpot_tunnel *tn;
	struct tpot_syn *syn;
	struct tpot_tunnel like = {};
	int r, answers, taken = 0, cookie = 0;
	__u32 listener = 0;

	if (!parse(skb, &in, outer->l4, outer->v6, 0) || in.proto != IPPROTO_TCP || (in.flags & (TH_SYN | TH_ACK)) == TH_SYN)
		goto unproven;
	answers = (in.flags & (TH_SYN | TH_ACK | TH_RST)) == (TH_SYN | TH_ACK);
	tn = bpf_map_lookup_elem(&tpot_tunnels, &in.t);
	syn = tn ? NULL : bpf_map_lookup_elem(&tpot_syns, &in.t);
	if (tn && same(tn->peer, outer->t.remote) && same(tn->own, outer->t.local)) {
		tn->ifindex = skb->ifindex;
		note(tn, &in, TPOT_FIN_IN);
		taken = tn->role == TPOT_TAKER;
		if (tn->flags & TPOT_COOKIE && has_socket(skb, &in))
			__sync_fetch_and_and(&tn->flags, ~TPOT_COOKIE);
		cookie = tn->flags & TPOT_COOKIE;
		listener = tn->listener;
	} else if (tn && tn->role == TPOT_ASKER && answers) {
		return reset_back(skb, outer, &in); /* another proxy was faster */
	} else if (syn && syn->role == TPOT_ASKER) {
		struct tuple taker = {};
		struct options *o;

		if (!(in.flags & TH_ACK) || in.ack != syn->seq + 1 || !(in.flags & (TH_SYN | TH_RST)) ||
		    !same(outer->t.local, in.t.local))
			goto unproven;
		if (syn->answered)
			return answers ? reset_back(skb, outer, &in) : drop(T_UNPROVEN); /* the server was faster */
		__builtin_memcpy(taker.remote, outer->t.remote, 16);
		if (!rule_for(TPOT_RULE_TRUST, &taker))
			return drop(T_UNTRUSTED);
		if (answers) {
			o = read_options(skb, &in);
			if (!o || !o->asks)
				goto unproven;
			like.role = TPOT_ASKER;
			if (open_tunnel(skb, &in.t, outer->t.remote, outer->t.local, &like))
				return drop(T_FAILED);
		}
	} else if (syn && syn->answered && same(syn->peer, outer->t.remote) && same(syn->own, outer->t.local)) {
		taken = 1;
		if (in.flags & TH_RST) { /* the asker has another answer already */
			if (in.seq != syn->seq + 1)
				goto unproven;
		} else if (!(in.flags & TH_ACK) || in.ack != syn->iss + 1) {
			goto unproven;
		} else {
			listener = syn->listener;
			cookie = !has_socket(skb, &in);
			like.role = TPOT_TAKER;
			like.hops = syn->hops;
			like.listener = listener;
			like.flags = cookie ? TPOT_COOKIE : 0;
			if (open_tunnel(skb, &in.t, syn->peer, syn->own, &like))
				return drop(T_FAILED);
		}
	} else {
		goto unproven;
	}
	r = decapsulate(skb, outer, &in);
	/* With SYN cookies, only the acknowledgement is left of the handshake. The kernel would not find our listener by it. */
	if (r == TCX_NEXT && cookie && assign(skb, listener))
		return drop(T_UNSERVED);
	return r == TCX_NEXT && taken ? deliver(skb) : r;

unproven:
	count(T_UNPROVEN);
	return TCX_NEXT;
}

/* A router's report that a tunnelled packet was too big for its link. What it quotes becomes the inner packet, and the MTU that of
 * the tunnel: then it concerns the connection, and goes to its socket or, spliced, to the other host (RFC 2003, 4.1; RFC 2473,
 * 8.1). Only the headers are quoted, which is enough for both. */
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
	if (!parse(skb, &outer, at, p->v6, 1) || outer.proto == IPPROTO_TCP || !parse(skb, &in, outer.l4, p->v6, 1) ||
	    in.proto != IPPROTO_TCP)
		return TCX_NEXT;
	tn = bpf_map_lookup_elem(&tpot_tunnels, &in.t);
	if (!tn || !same(tn->peer, outer.t.remote) || !same(tn->own, outer.t.local))
		return TCX_NEXT;
	size = in.l3_len + 20;
	if (bpf_ntohl(mtu) < 256 + in.l3_len)
		return TCX_NEXT;
	mtu = bpf_htonl(bpf_ntohl(mtu) - in.l3_len);
	if (bpf_skb_load_bytes(skb, in.l3, quote, p->v6 ? 60 : 40) || bpf_skb_change_tail(skb, at + size, 0) ||
	    bpf_skb_store_bytes(skb, at, quote, p->v6 ? 60 : 40, BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, p->l4 + 4, &mtu, 4, BPF_F_RECOMPUTE_CSUM))
		return drop(T_FAILED);
	/* the sum anew: type, MTU, quote, and for ICMPv6 the pseudo-header */
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

SEC("tcx/ingress")
int tpot_ingress(struct __sk_buff *skb)
{
	struct packet p = {};
	struct tpot_tunnel *tn;
	struct options *o;
	struct tpot_syn *syn;

	if (skb->pkt_type != PACKET_HOST || IS_OUR_MARK(skb->mark) || !parse_frame(skb, &p, 0))
		return TCX_NEXT;
	if (p.proto == (p.v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return translate_error(skb, &p);
	if (p.proto != IPPROTO_TCP)
		return from_tunnel(skb, &p);
	tn = bpf_map_lookup_elem(&tpot_tunnels, &p.t);
	if (tn && (p.flags & (TH_SYN | TH_ACK)) == TH_SYN && is_over(tn)) {
		bpf_map_delete_elem(&tpot_tunnels, &p.t);
		tn = NULL;
	}
	if (tn && tn->role == TPOT_ASKER && (p.flags & (TH_SYN | TH_ACK | TH_RST)) == (TH_SYN | TH_ACK)) {
		/* SYN and retransmission took different routes, and the server has got one of them */
		return reset_back(skb, NULL, &p);
	}
	if (tn && tn->role == TPOT_ASKER)
		return drop(T_PLAIN_REFUSED);
	if (tn) {
		note(tn, &p, TPOT_FIN_IN);
		count(T_PLAIN);
		return deliver(skb);
	}
	if (!(p.flags & (TH_SYN | TH_RST)))
		return TCX_NEXT;
	if ((p.flags & (TH_SYN | TH_ACK)) == TH_SYN) {
		o = read_options(skb, &p);
		return o && o->asks ? intercept(skb, &p, o) : TCX_NEXT;
	}
	/* The server itself has answered. */
	syn = bpf_map_lookup_elem(&tpot_syns, &p.t);
	if (syn && syn->role == TPOT_ASKER && p.flags & TH_ACK && p.ack == syn->seq + 1 && !syn->answered) {
		__u64 at = now();

		syn->answered = 1;
		if (syn->bare) /* something on the path drops segments with the option */
			bpf_map_update_elem(&tpot_avoided, p.t.remote, &at, BPF_ANY);
	}
	return TCX_NEXT;
}

/* ---- packets that leave ---- */

/* Put the packet into the tunnel. The inner segment's size stays as it is: the MSS has left room for the header. A segment of
 * more than 64 KB, before its segmentation, has no length in its outer header, as BIG TCP defines it. */
static __always_inline int encapsulate(struct __sk_buff *skb, const struct packet *p, const __u32 *peer, const __u32 *own)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO |
		      (p->v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4);
	__u32 len = skb->len - p->l3, df = 0;
	__u16 frag = 0;
	int r;

	if (!p->v6) {
		bpf_skb_load_bytes(skb, p->l3 + 6, &frag, 2);
		df = frag & bpf_htons(0x4000);
	}
	r = bpf_skb_adjust_room(skb, p->l3_len, BPF_ADJ_ROOM_MAC, flags);
	/* A packet that was decapsulated here counts as encapsulated until Linux 7.1 or so, with the right inner header. */
	if (r == -EALREADY)
		r = bpf_skb_adjust_room(skb, p->l3_len, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
	if (r)
		return drop(T_FAILED);
	if (p->v6) {
		struct ipv6hdr ip = {
			.version = 6, .priority = p->tos >> 4, .flow_lbl = { (p->tos & 0xf) << 4 },
			.payload_len = bpf_htons(len > 65535 ? 0 : len), .nexthdr = IPPROTO_IPV6, .hop_limit = TTL,
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
			.version = 4, .ihl = 5, .tos = p->tos, .protocol = IPPROTO_IPIP, .ttl = TTL, .frag_off = df,
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

/* A SYN of this host. */
static __always_inline int ask(struct __sk_buff *skb, struct packet *p, __u32 mark)
{
	struct tpot_config *c = configured();
	struct tpot_syn syn = { .seq = p->seq, .role = TPOT_ASKER }, *known;
	__u64 *avoided;
	__u8 hops;
	int r;

	if (!c || !c->rules || !rule_for(TPOT_RULE_ASK, &p->t))
		return TCX_NEXT;
	/* a proxy asks the next one with what was left when it was asked */
	hops = (mark & 0xffffff00) == MARK_HOPS ? mark : c->hops;
	if (!hops)
		return TCX_NEXT;
	if (c->cgroup && bpf_skb_ancestor_cgroup_id(skb, c->level) != c->cgroup)
		return TCX_NEXT;
	avoided = bpf_map_lookup_elem(&tpot_avoided, p->t.remote);
	if (avoided && now() - *avoided < TPOT_AVOID * SECOND) {
		count(T_AVOIDED);
		return TCX_NEXT;
	}
	known = bpf_map_lookup_elem(&tpot_syns, &p->t);
	if (known && known->role == TPOT_ASKER && known->seq == p->seq) {
		syn.asked = known->asked;
		if (syn.asked >= ASK_TIMES) {
			known->bare = 1;
			count(T_NOT_ASKED);
			return TCX_NEXT;
		}
	}
	syn.asked++;
	if (bpf_map_update_elem(&tpot_syns, &p->t, &syn, BPF_ANY))
		return TCX_NEXT;
	r = append_option(skb, p, hops);
	if (r < 0)
		return drop(T_FAILED);
	count(r ? T_NO_SPACE : T_ASKED);
	return TCX_NEXT;
}

/* The answer of our listener to an intercepted SYN, or its refusal. */
static __always_inline int answer(struct __sk_buff *skb, struct packet *p, struct tpot_syn *syn)
{
	struct options *o;

	if ((p->flags & (TH_SYN | TH_ACK)) == (TH_SYN | TH_ACK)) {
		if (p->ack != syn->seq + 1)
			return TCX_NEXT;
		o = read_options(skb, p);
		if (!o || shrink_mss(skb, p, o) || append_option(skb, p, syn->hops - 1))
			return drop(T_FAILED); /* without the option, the asker would not know its tunnel */
		syn->iss = p->seq;
		syn->answered = 1;
	}
	return encapsulate(skb, p, syn->peer, syn->own);
}

SEC("tcx/egress")
int tpot_egress(struct __sk_buff *skb)
{
	struct packet p = {};
	struct tpot_tunnel *tn;
	struct tpot_syn *syn;
	__u32 mark = skb->mark;
	int r;

	if (mark == MARK_PLAIN || mark == MARK_TAKEN || (mark & 0xffffff00) == MARK_HOPS)
		skb->mark = 0; /* this was the last to know it */
	if (mark == MARK_PLAIN)
		return TCX_NEXT;
	if (!parse_frame(skb, &p, 1) || p.proto != IPPROTO_TCP)
		return TCX_NEXT;
	tn = bpf_map_lookup_elem(&tpot_tunnels, &p.t);
	if (tn && (p.flags & (TH_SYN | TH_ACK)) == TH_SYN) { /* the port of an earlier connection */
		bpf_map_delete_elem(&tpot_tunnels, &p.t);
		tn = NULL;
	}
	if (tn) {
		note(tn, &p, TPOT_FIN_OUT);
		r = encapsulate(skb, &p, tn->peer, tn->own);
		/* The next hop was chosen for the inner destination. That is the taker's peer, but not the asker's. */
		return r == TCX_NEXT && tn->role == TPOT_ASKER ? bpf_redirect_neigh(tn->ifindex, NULL, 0, 0) : r;
	}
	if ((p.flags & (TH_SYN | TH_ACK)) == TH_SYN)
		return skb->ingress_ifindex ? TCX_NEXT : ask(skb, &p, mark);
	if (!(p.flags & (TH_SYN | TH_RST)))
		return TCX_NEXT;
	syn = bpf_map_lookup_elem(&tpot_syns, &p.t);
	return syn && syn->role == TPOT_TAKER ? answer(skb, &p, syn) : TCX_NEXT;
}
