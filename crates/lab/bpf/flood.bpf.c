/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A flood of small packets over many flows, and the sink where it ends.
 *
 * Theory of operation. User space runs `generate` by BPF_PROG_TEST_RUN with live frames: the kernel makes batches of
 * frames, the program writes a segment of a random flow into each, and sends it out of the client's device. The
 * forwarder receives them as from any device with NAPI, and passes them on somehow. `sink` at the server's device
 * counts and drops them. `sink_skb` is for packets that are put behind that device's driver, where no XDP program
 * sees them.
 *
 * All of this happens on the CPU that runs the program: a batch is made, then the softirqs that it raises run, then
 * the next one is made. So nothing piles up, and the counters need no atomic instructions.
 *
 * Each packet is the next in the order of its flow, as most packets are. PSH keeps GRO from joining two.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "flood.h"

#define PAYLOAD 1
#define IP_LEN (20 + 20 + PAYLOAD)
/* So many packets have their checksums looked at; later ones cost no more than to be counted. */
#define CHECKED 4096

const volatile __u64 settings[FLOOD_SETTINGS] = {};
__u64 counts[FLOOD_COUNTS] = {};

/* Packets sent, by flow. User space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} sent SEC(".maps");

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* Sums of the headers as they are, their checksums included: 0xffff if right. */
static __always_inline __u16 ip_sum(const __be32 *ip)
{
	return fold((__u64)ip[0] + ip[1] + ip[2] + ip[3] + ip[4]);
}

static __always_inline __u16 tcp_sum(const __be32 *ip, const __be32 *tcp, const __u8 *payload)
{
	__u64 pseudo = (__u64)ip[3] + ip[4] + bpf_htonl(IPPROTO_TCP << 16 | (IP_LEN - 20));

	return fold(pseudo + tcp[0] + tcp[1] + tcp[2] + tcp[3] + tcp[4] + bpf_htons(*payload << 8));
}

SEC("xdp")
int generate(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__be32 *ip = data + ETH_HLEN, *tcp = ip + 5;
	__u64 to = settings[FLOOD_TO_MAC], from = settings[FLOOD_FROM_MAC];
	__u8 *payload = (void *)(tcp + 5);
	__u32 flow, port, *before;

	if ((void *)(payload + PAYLOAD) > end)
		return XDP_ABORTED;
	flow = (bpf_get_prandom_u32() * settings[FLOOD_FLOWS]) >> 32;
	before = bpf_map_lookup_elem(&sent, &flow);
	if (!before)
		return XDP_ABORTED;
	port = settings[FLOOD_SOURCE_PORT] + (flow & ((1 << settings[FLOOD_PORT_BITS]) - 1));

	__builtin_memcpy(data, &to, 6);
	__builtin_memcpy(data + 6, &from, 6);
	*(__be16 *)(data + 12) = bpf_htons(ETH_P_IP);
	ip[0] = bpf_htonl(0x45000000 | IP_LEN);
	ip[1] = bpf_htonl(0x4000); /* do not fragment */
	ip[2] = bpf_htonl(64 << 24 | IPPROTO_TCP << 16);
	ip[3] = bpf_htonl(settings[FLOOD_SOURCE] + (flow >> settings[FLOOD_PORT_BITS]));
	ip[4] = bpf_htonl(settings[FLOOD_TARGET]);
	((struct iphdr *)ip)->check = ~ip_sum(ip);
	tcp[0] = bpf_htonl(port << 16 | settings[FLOOD_TARGET_PORT]);
	tcp[1] = bpf_htonl(settings[FLOOD_SEQ] + (*before)++ * PAYLOAD);
	tcp[2] = bpf_htonl(settings[FLOOD_ACK]);
	tcp[3] = bpf_htonl(0x50180000 | 0xffff); /* PSH and ACK, the largest window */
	tcp[4] = 0;
	*payload = 'x';
	((struct tcphdr *)tcp)->check = ~tcp_sum(ip, tcp, payload);
	counts[FLOOD_SENT]++;
	return bpf_redirect(settings[FLOOD_DEVICE], 0);
}

SEC("xdp")
int pass_on(struct xdp_md *ctx)
{
	counts[FLOOD_SENT]++;
	return bpf_redirect(settings[FLOOD_DEVICE], 0);
}

/* Is it one of ours? */
static __always_inline int arrive(void *data, void *end)
{
	struct iphdr *ip = data + ETH_HLEN;
	struct tcphdr *tcp = (void *)(ip + 1);
	__u8 *payload = (void *)(tcp + 1);

	if ((void *)(payload + PAYLOAD) > end || *(__be16 *)(data + 12) != bpf_htons(ETH_P_IP) ||
	    ip->protocol != IPPROTO_TCP || tcp->dest != bpf_htons(settings[FLOOD_SINK_PORT]))
		return 0;
	if (counts[FLOOD_ARRIVED]++ < CHECKED &&
	    (ip_sum((void *)ip) != 0xffff || tcp_sum((void *)ip, (void *)tcp, payload) != 0xffff))
		counts[FLOOD_WRONG]++;
	return 1;
}

SEC("xdp")
int sink(struct xdp_md *ctx)
{
	return arrive((void *)(long)ctx->data, (void *)(long)ctx->data_end) ? XDP_DROP : XDP_PASS;
}

SEC("tc")
int sink_skb(struct __sk_buff *skb)
{
	return arrive((void *)(long)skb->data, (void *)(long)skb->data_end) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual MIT/GPL";
