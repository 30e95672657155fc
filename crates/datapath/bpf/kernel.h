/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The fields that the programs read from the kernel's own structures. */
#ifndef LONGSPLICE_KERNEL_H
#define LONGSPLICE_KERNEL_H

#include "compat.h"
#include <bpf/bpf_core_read.h>

struct sk_buff {
	struct sk_buff *next, *prev;
	char cb[48]; /* of a segment in a socket's queue: its first and its next sequence number, host order (struct tcp_skb_cb) */
	unsigned char *head, *data;
	__u32 end;
	__u8 cloned : 1;
	__u8 ip_summed : 2;
	__u32 csum;
	int skb_iif;
} __attribute__((preserve_access_index));

struct skb_shared_info {
	struct sk_buff *frag_list;
	__u32 gso_type;
} __attribute__((preserve_access_index));

struct net_device {
	unsigned char *dev_addr;
	int ifindex;
} __attribute__((preserve_access_index));

typedef struct {
	int owned; /* a process works on the socket: segments that arrive meanwhile wait */
} __attribute__((preserve_access_index)) socket_lock_t;

struct sock_common {
	__u8 skc_state; /* BPF_TCP_ESTABLISHED, for example */
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	socket_lock_t sk_lock;
	int sk_rx_dst_ifindex; /* the device on which its segments arrive */
} __attribute__((preserve_access_index));

struct inet_sock {
	struct sock sk;
} __attribute__((preserve_access_index));

struct inet_connection_sock {
	struct inet_sock icsk_inet;
} __attribute__((preserve_access_index));

struct rb_node;

struct rb_root {
	struct rb_node *rb_node; /* NULL: empty */
} __attribute__((preserve_access_index));

struct tcp_options_received {
	__u32 ts_recent; /* latest TSval */
	__u32 rcv_tsecr; /* latest echo, less tsoffset */
	__u16 tstamp_ok : 1, wscale_ok : 1, sack_ok : 3, snd_wscale : 4, rcv_wscale : 4;
	__u16 mss_clamp; /* the MSS that the host has announced, or less */
} __attribute__((preserve_access_index));

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 snd_una, snd_nxt, write_seq, snd_wnd;
	__u32 tsoffset; /* added to the kernel's clock for our TSvals */
	__u32 copied_seq, rcv_nxt, rcv_wup, rcv_wnd; /* rcv_wup: what was acknowledged last, with the window rcv_wnd */
	__u16 advmss; /* the MSS that we have announced, less the option of timestamps */
	__u8 ecn_flags : 5;
	struct rb_root out_of_order_queue;
	struct sk_buff *ooo_last_skb; /* the last segment behind a gap, unless that queue is empty */
	struct tcp_options_received rx_opt;
} __attribute__((preserve_access_index));

void *bpf_cast_to_kern_ctx(void *) __ksym;
void *bpf_rdonly_cast(const void *, __u32) __ksym;

/* Read eight bytes of kernel memory. The cast needs a kernel type, and struct bpf_iter_num has just that size. */
static __always_inline __u64 eight_at(const void *at)
{
	struct bpf_iter_num *n = bpf_rdonly_cast(at, bpf_core_type_id_kernel(struct bpf_iter_num));

	return n->__opaque[0];
}

#endif
