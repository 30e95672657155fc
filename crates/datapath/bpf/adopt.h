/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Adoption: a connection gets a record that had none, from what its socket says. Anybody may have made the socket, and anything
 * may have passed. User space takes three steps:
 * 1. ADOPT_ATTEND makes record and path entry. From now on, each segment that passes a program is recorded.
 * 2. It waits for a grace period of RCU. A program and the socket behind it see a segment within one: each segment that has
 *    passed before there was a record has reached its socket then, or the queue of a socket on which a process works.
 * 3. ADOPT_FINISH completes the record, while no process works on the socket. Every byte that has arrived is below the latest of
 *    what was recorded, what the socket expects next, and the end of what it has behind a gap.
 * User space says where in the streams the next bytes are that are read and written. */
#ifndef LONGSPLICE_ADOPT_H
#define LONGSPLICE_ADOPT_H

#include <asm-generic/errno-base.h>
#include "calls.h"
#include "handshake.h"

#define ECN_OK 1       /* ecn_flags: RFC 3168 was negotiated */
#define ECN_ACC (1 << 4) /* ... or AccECN */
#define TS_OPTION 12   /* bytes that the option takes in each segment, with its padding */

/* Fill in a record from its socket. The socket may be at work on another processor. */
static __always_inline void describe_socket(struct leg *l, const struct tcp_sock *tp)
{
	const struct tcp_options_received *o = &tp->rx_opt;

	l->flags = (BPF_CORE_READ_BITFIELD(o, tstamp_ok) ? LEG_TS : 0) | (BPF_CORE_READ_BITFIELD(o, sack_ok) ? LEG_SACK : 0) |
		   (BPF_CORE_READ_BITFIELD(tp, ecn_flags) & ECN_OK ? LEG_ECN : 0);
	l->wscale_in = BPF_CORE_READ_BITFIELD(o, snd_wscale);
	l->wscale_out = BPF_CORE_READ_BITFIELD(o, rcv_wscale);
	l->mss_in = o->mss_clamp;
	l->mss_out = tp->advmss + (l->flags & LEG_TS ? TS_OPTION : 0);
	l->max_in = tp->rcv_nxt;
	l->ack_in = tp->snd_una;
	l->edge_in = l->ack_in + tp->snd_wnd;
	l->ack_out = l->ack_local = tp->rcv_wup;
	l->win_out = l->win_local = tp->rcv_wnd;
	l->edge_out = l->ack_out + l->win_out;
	l->max_out = l->local_out = tp->snd_nxt;
	if (l->flags & LEG_TS) {
		l->tsval_in = o->ts_recent;
		l->floor_in = l->tsval_in - (1u << 29); /* as follow_floor() leaves it */
		l->tsval_out = o->rcv_tsecr + tp->tsoffset; /* one that was sent, or the socket would be given another clock */
	}
}

/* Raise the numbers of a record to what its socket says by now: segments may have passed while there was none. Under the lock. */
static __always_inline void catch_up_with(struct leg *l, const struct leg *now)
{
	advance_in(l, now->max_in);
	l->ack_in = later(l->ack_in, now->ack_in);
	l->edge_in = later(l->edge_in, now->edge_in);
	l->ack_out = later(l->ack_out, now->ack_out);
	l->ack_local = later(l->ack_local, now->ack_local);
	l->edge_out = later(l->edge_out, now->edge_out);
	l->max_out = later(l->max_out, now->max_out);
	l->local_out = later(l->local_out, now->local_out);
}

/* Is a connection open in one direction at least, and has its caller sent a FIN if the socket has? */
static __always_inline int is_open(__u32 state, __u32 shut)
{
	__u32 states = shut ? 1 << BPF_TCP_FIN_WAIT1 | 1 << BPF_TCP_FIN_WAIT2 : 1 << BPF_TCP_ESTABLISHED | 1 << BPF_TCP_CLOSE_WAIT;

	return state < 32 && states >> state & 1;
}

/* Find the socket of a connection that is open. Returns an enum adopt_result. ADOPT_OK: *sk has to be given back. */
static __always_inline int open_socket(struct __sk_buff *skb, const struct adopt_args *args, struct bpf_sock **sk,
				       struct tcp_sock **tp)
{
	int r = ADOPT_CLOSING;

	*sk = socket_at(skb, &args->leg, !tuple_is_v4(&args->leg));
	if (!*sk)
		return ADOPT_GONE;
	*tp = is_open((*sk)->state, args->shut) ? bpf_skc_to_tcp_sock(*sk) : NULL;
	if (*tp)
		r = BPF_CORE_READ_BITFIELD(*tp, ecn_flags) & ECN_ACC ? ADOPT_OPTIONS : ADOPT_OK;
	if (r)
		bpf_sk_release(*sk);
	return r;
}

static __noinline int attend(struct __sk_buff *skb, struct adopt_args *args)
{
	struct bpf_sock *sk;
	struct tcp_sock *tp;
	struct leg *l, first = {};
	int r;

	if (bpf_map_lookup_elem(&legs, &args->leg) || find_path(&args->leg))
		return ADOPT_KNOWN;
	r = open_socket(skb, args, &sk, &tp);
	if (r)
		return r;
	describe_socket(&first, tp);
	first.seen = args->since = bpf_ktime_get_coarse_ns() - 1; /* heard(): later, even within one tick of that clock */
	r = bpf_map_update_elem(&legs, &args->leg, &first, BPF_NOEXIST);
	if (!r && insert_path(&args->leg)) {
		bpf_map_delete_elem(&legs, &args->leg);
		r = -E2BIG;
	}
	l = r ? NULL : bpf_map_lookup_elem(&legs, &args->leg);
	if (l) {
		describe_socket(&first, tp);
		bpf_spin_lock(&l->lock);
		catch_up_with(l, &first);
		bpf_spin_unlock(&l->lock);
	}
	bpf_sk_release(sk);
	args->generation = generation(&args->leg);
	if (l)
		return ADOPT_OK;
	if (r == -EEXIST)
		return ADOPT_KNOWN;
	count_only(V_TABLE_FULL);
	return ADOPT_FULL;
}

/* What a socket has received and read. */
struct received {
	/* next: it expects; last: the end of what it has, which may be behind a gap; copied: of the data, read */
	__u32 next, last, copied;
	__u32 state;
	int busy, fin; /* fin: the last is the host's FIN */
	struct sk_buff *behind;
};

static __always_inline void read_received(struct received *v, const struct tcp_sock *tp)
{
	const struct sock *sk = &tp->inet_conn.icsk_inet.sk;

	v->busy = *(volatile int *)&sk->sk_lock.owned;
	v->state = *(volatile __u8 *)&sk->__sk_common.skc_state;
	v->fin = v->state == BPF_TCP_CLOSE_WAIT;
	v->next = v->last = *(volatile __u32 *)&tp->rcv_nxt;
	v->copied = *(volatile __u32 *)&tp->copied_seq;
	if (v->fin && v->copied == v->next)
		v->copied--; /* the FIN was read, too */
	v->behind = *(struct rb_node *volatile *)&tp->out_of_order_queue.rb_node ? *(struct sk_buff *volatile *)&tp->ooo_last_skb : NULL;
	if (v->behind) {
		v->last = later(v->last, eight_at(v->behind->cb) >> 32);
		v->fin = eight_at(v->behind->cb + 8) >> 32 & TH_FIN; /* tcp_flags of struct tcp_skb_cb; what is coalesced keeps it */
	}
}

static __noinline int finish(struct __sk_buff *skb, struct adopt_args *args)
{
	struct received one = {}, two = {};
	struct leg *l = bpf_map_lookup_elem(&legs, &args->leg), now = {};
	struct bpf_sock *sk;
	struct tcp_sock *tp;
	__u32 written, arrives;
	__u64 now_ns = bpf_ktime_get_coarse_ns();
	int r, unseen;

	if (!l || generation(&args->leg) != args->generation)
		return ADOPT_OTHER;
	if (l->flags & LEG_TRACKED)
		return ADOPT_KNOWN;
	if (l->flags & LEG_FRAGMENTS)
		return ADOPT_FRAGMENTS;
	if (l->flags & LEG_RESET)
		return ADOPT_CLOSING;
	r = open_socket(skb, args, &sk, &tp);
	if (r)
		return r;
	read_received(&one, tp);
	describe_socket(&now, tp);
	written = tp->write_seq;
	read_received(&two, tp);
	arrives = tp->inet_conn.icsk_inet.sk.sk_rx_dst_ifindex;
	bpf_sk_release(sk);
	/* Do both directions pass our programs, as packets of this connection? What was sent has to have been seen. What comes has, or
	 * it comes through the same device. */
	unseen = l->seen <= args->since;
	if (!l->ifindex || (unseen && arrives != l->ifindex))
		return ADOPT_SILENT;
	/* The socket may be receiving on another processor, and what was behind a gap may be freed: then the numbers are not of one
	 * moment, or not below what the host may send. */
	if (one.busy || two.busy || one.next != two.next || one.behind != two.behind || one.last != two.last ||
	    one.copied != two.copied || one.state != two.state || after(one.last, later(l->edge_out, now.edge_out)))
		return ADOPT_BUSY;
	bpf_spin_lock(&l->lock);
	catch_up_with(l, &now);
	advance_in(l, one.last);
	l->in64 = args->consumed + (l->max_in - one.copied);
	l->iss = written - 1 - (__u32)args->produced;
	if (one.fin && l->max_in == one.last)
		l->flags |= LEG_FIN_IN;
	if (one.state == BPF_TCP_FIN_WAIT2)
		l->flags |= LEG_FIN_OUT | LEG_FIN_ACKED;
	else if (one.state == BPF_TCP_FIN_WAIT1 && l->max_out == written)
		l->flags |= LEG_FIN_OUT; /* otherwise it has not been sent */
	if (unseen) {
		l->seen = now_ns - args->silent * NS_PER_MS;
		compare_clocks(l, l->tsval_in, l->seen);
	}
	/* The host's clock was compared with a TSval of unknown age: heard() takes a host that was silent for one with a fast clock. */
	l->flags = (l->flags & ~LEG_FAST_CLOCK) | LEG_TRACKED;
	bpf_spin_unlock(&l->lock);
	return ADOPT_OK;
}

SEC("tc")
int adopt(struct __sk_buff *skb)
{
	struct adopt_args args;

	if (bpf_skb_load_bytes(skb, ETH_LEN, &args, sizeof(args)))
		return 1;
	args.result = args.op == ADOPT_ATTEND ? attend(skb, &args) : finish(skb, &args);
	return !!bpf_skb_store_bytes(skb, ETH_LEN, &args, sizeof(args), 0);
}

#endif
