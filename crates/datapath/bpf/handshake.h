/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Foreign connections: neither end has an address of ours, and neither is to see us. The hosts shake hands with each other, so
 * that numbers, clocks and options are the same on both sides; user space passes their SYN, SYN-ACK and first ACK on, and makes
 * a socket for either side before its host may send data. What these two are sent is marked, for a rule of routing to take it
 * to local sockets. */
#ifndef LONGSPLICE_HANDSHAKE_H
#define LONGSPLICE_HANDSHAKE_H

#include "parse.h"
#include "place.h"
#include "verdict.h"

/* Takes packets for addresses of others to local sockets: routing has a rule for it. */
#define MARK_FOREIGN 0x6c73706d

/* Gives a segment of a handshake to user space; 0: there is no room. */
__noinline int report_handshake(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct handshake *h;

	if (!sc)
		return 0;
	parse_options(skb); /* all of them are in sc->orig then */
	h = bpf_ringbuf_reserve(&handshakes, sizeof(*h), 0);
	if (!h) {
		count(V_HANDSHAKE_LOST);
		return 0;
	}
	h->leg = sc->t;
	__builtin_memcpy(h->ip, sc->l3, 40);
	__builtin_memcpy(h->tcp, sc->orig, 60);
	h->payload = sc->s.len;
	bpf_ringbuf_submit(h, 0);
	count(V_HANDSHAKE);
	return 1;
}

/* enum bpf_tcp_state of the socket that gets the segment; 0: there is none. struct tuple and struct tuple4 are laid out as struct
 * bpf_sock_tuple is. */
static __always_inline __u32 socket_state(struct __sk_buff *skb, const struct scratch *sc)
{
	struct tuple4 k = key4(&sc->t);
	struct bpf_sock *sk;
	__u32 state;

	if (sc->v6)
		sk = bpf_skc_lookup_tcp(skb, (void *)&sc->t, sizeof(sc->t), BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_skc_lookup_tcp(skb, (void *)&k, sizeof(k), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

/* Is there a socket of this connection? */
static __always_inline int has_socket(struct __sk_buff *skb, const struct scratch *sc)
{
	__u32 state = socket_state(skb, sc);

	return state && state != BPF_TCP_LISTEN;
}

/* Is there one that a SYN does not concern? Not while it is being opened, or waits for nothing but the time to pass. */
static __always_inline int has_live_socket(struct __sk_buff *skb, const struct scratch *sc)
{
	__u32 state = socket_state(skb, sc);

	return state && state != BPF_TCP_LISTEN && state != BPF_TCP_TIME_WAIT && state != BPF_TCP_NEW_SYN_RECV;
}

/* Is this the client of a foreign connection that has not completed its handshake? A RST from a local socket belongs to an
 * earlier attempt whose process has died. The client would take it for an answer to its SYN. */
static __always_inline int is_shaking_hands(const struct scratch *sc)
{
	const struct embryo *e = bpf_map_lookup_elem(&embryos, &sc->t);

	return e && e->opts_in & OPT_FOREIGN;
}

/* Has the client of a foreign connection completed the handshake? `sc` is of a segment of its server. */
static __always_inline int has_client(struct scratch *sc)
{
	struct tuple *client = &sc->other;

	__builtin_memcpy(client->remote, sc->t.local, 16);
	__builtin_memcpy(client->local, sc->t.remote, 16);
	client->rport = sc->t.lport;
	client->lport = sc->t.rport;
	return !!bpf_map_lookup_elem(&legs, client);
}

#endif
