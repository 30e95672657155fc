/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Impairment of one direction of one device, for kernels without netem.
 *
 * Theory of operation. `impair` sees every packet of the direction and decides its fate: lost, duplicated, sent on, or
 * sent on a detour. The detour is a pair of veth in the same namespace; user space (delay.rs) takes frames from its
 * far end, keeps them for as long as they are to be late, and sends them back the same way:
 *
 *	device --- impair ---> near end ===> far end --- delay.rs
 *	device <-- return ---- near end <=== far end <-- delay.rs
 *
 * `came_back` at the near end puts them where they were taken from. They are known by their mark there. `swallow` at the
 * far end keeps the stack from looking at frames that are on their way.
 *
 * Other programs of the device see each packet once, as if it were impaired on the wire. So `impair` runs before them where
 * packets arrive, and after them where packets leave. There, `pass_by` leads packets that come back past all programs. On
 * the detour, programs that attach to every device see nothing.
 *
 * A packet's fate is a function of the seed and of how many came before it, so nothing is shared but a counter. Only
 * TCP and UDP are impaired: a neighbour that cannot be resolved would be a fault of the lab.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "lab.h"

/* Says that a packet has met its fate already. Any number that no host uses would do. */
#define DECIDED 0x1ab0dec1

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SETTINGS);
	__type(key, __u32);
	__type(value, __u64);
} settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

/* Packets of each connection, by its ports: within one lab they are enough. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} connections SEC(".maps");

static __always_inline __u64 setting(__u32 which)
{
	__u64 *value = bpf_map_lookup_elem(&settings, &which);

	return value ? *value : 0;
}

/* Counts, and gives the number before. */
static __always_inline __u64 count(__u32 which)
{
	__u64 *value = bpf_map_lookup_elem(&counts, &which);

	return value ? __sync_fetch_and_add(value, 1) : 0;
}

/* Draws for packet number `number` with one of several independent dice (splitmix64). */
static __always_inline bool chance(__u32 probability, __u64 number, __u64 dice)
{
	__u64 limit = setting(probability);
	__u64 z = setting(SETTING_SEED) + (number * 4 + dice) * 0x9e3779b97f4a7c15ULL;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
	z ^= z >> 31;
	return (z >> 32) < limit;
}

/* Returns the length of the IP header at an offset, and its protocol. */
static __always_inline __u32 header_at(struct __sk_buff *skb, __u32 at, __u8 *protocol)
{
	__u8 version_and_length = 0;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		bpf_skb_load_bytes(skb, at + offsetof(struct iphdr, protocol), protocol, 1);
		bpf_skb_load_bytes(skb, at, &version_and_length, 1);
		return (version_and_length & 0xf) * 4;
	}
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return 0;
	bpf_skb_load_bytes(skb, at + offsetof(struct ipv6hdr, nexthdr), protocol, 1);
	return sizeof(struct ipv6hdr);
}

/* Returns the offset of the TCP or UDP header, which may be in a tunnel (RFC 2003, RFC 2473), or 0 for other packets. */
static __always_inline __u32 transport(struct __sk_buff *skb)
{
	__u8 protocol = 0;
	__u32 at = ETH_HLEN + header_at(skb, ETH_HLEN, &protocol);

	if (protocol == IPPROTO_IPIP || protocol == IPPROTO_IPV6)
		at += header_at(skb, at, &protocol);
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP ? at : 0;
}

/* Is the packet one that SETTING_LOSS may lose? */
static __always_inline bool may_be_lost(struct __sk_buff *skb, __u32 header)
{
	__u64 first = setting(SETTING_LOSS_AMONG_FIRST), none = 0, *packets;
	__u32 ports = 0;

	if (!first)
		return true;
	bpf_skb_load_bytes(skb, header, &ports, sizeof(ports));
	bpf_map_update_elem(&connections, &ports, &none, BPF_NOEXIST);
	packets = bpf_map_lookup_elem(&connections, &ports);
	return packets && __sync_fetch_and_add(packets, 1) < first;
}

/* The copy goes the way the packet itself will go. */
static __always_inline void duplicate(struct __sk_buff *skb)
{
	__u64 flags = setting(SETTING_INGRESS) ? BPF_F_INGRESS : 0;

	count(COUNT_DUPLICATED);
	if (setting(SETTING_DETOUR_ALL)) {
		bpf_clone_redirect(skb, setting(SETTING_DETOUR), 0);
		return;
	}
	skb->mark = DECIDED;
	bpf_clone_redirect(skb, setting(SETTING_DEVICE), flags);
	skb->mark = 0;
}

SEC("tc")
int impair(struct __sk_buff *skb)
{
	__u64 number, every;
	__u32 header;

	if (skb->mark == DECIDED) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	header = transport(skb);
	if (!header)
		return TC_ACT_UNSPEC;

	number = count(COUNT_SEEN);
	every = setting(SETTING_DROP_EVERY);
	if ((every && number % every == every - 1) || (may_be_lost(skb, header) && chance(SETTING_LOSS, number, 0))) {
		count(COUNT_LOST);
		/* A sender's TCP would be told of TC_ACT_SHOT, and would not count the packet as sent. tcx knows nothing else. */
		return setting(SETTING_INGRESS) ? TC_ACT_SHOT : TC_ACT_STOLEN;
	}
	/* As a router with ECN: only what may be marked is (RFC 3168, 5). */
	if (chance(SETTING_MARK, number, 3) && bpf_skb_ecn_set_ce(skb))
		count(COUNT_MARKED);
	if (chance(SETTING_DUPLICATE, number, 1))
		duplicate(skb);
	if (setting(SETTING_DETOUR_ALL) || chance(SETTING_REORDER, number, 2))
		return bpf_redirect(setting(SETTING_DETOUR), 0);
	return TC_ACT_UNSPEC;
}

/* Before all other programs where the impaired device sends: a packet that has met its fate is on the wire. */
SEC("tc")
int pass_by(struct __sk_buff *skb)
{
	if (skb->mark != DECIDED)
		return TC_ACT_UNSPEC;
	skb->mark = 0;
	return TC_ACT_OK;
}

/* Before all other programs where the ends of the detour send. */
SEC("tc")
int on_detour(struct __sk_buff *skb)
{
	return TC_ACT_OK;
}

SEC("tc")
int came_back(struct __sk_buff *skb)
{
	skb->mark = DECIDED;
	return bpf_redirect(setting(SETTING_DEVICE), setting(SETTING_INGRESS) ? BPF_F_INGRESS : 0);
}

SEC("tc")
int swallow(struct __sk_buff *skb)
{
	return TC_ACT_SHOT;
}

char _license[] SEC("license") = "Dual MIT/GPL";
