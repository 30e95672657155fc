/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Handshakes between hosts, end to end: sequence numbers, clocks and options are the same on both sides. User space passes on the
 * hosts' SYN, SYN-ACK and first ACK, and creates a socket for each side before its host may send data. There are two kinds:
 * - Transparent connections: neither end has an address of ours, and neither must notice us. Packets for the sockets
 *   get a mark, by which a routing rule delivers them locally.
 * - Connections of clients to a listening socket of ours: user space chooses the server. If it has none for a SYN, it gives the
 *   SYN back, and the listening socket gets it. */
#ifndef LONGSPLICE_HANDSHAKE_H
#define LONGSPLICE_HANDSHAKE_H

#include "aside.h"
#include "kernel.h"
#include "mark.h"
#include "parse.h"
#include "place.h"
#include "table.h"
#include "verdict.h"

/* Give a handshake segment to user space. Returns 0 if the ring is full. */
__noinline int report_handshake(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct handshake *h;

	if (!sc)
		return 0;
	parse_options(skb); /* reads the whole header into sc->orig */
	h = bpf_ringbuf_reserve(&handshakes, sizeof(*h), 0);
	if (!h) {
		count(V_HANDSHAKE_LOST);
		return 0;
	}
	h->leg = sc->t;
	h->generation = generation(&sc->t);
	h->ifindex = skb->ifindex;
	bpf_skb_load_bytes(skb, 0, h->eth, ETH_LEN);
	__builtin_memcpy(h->ip, sc->l3, 40);
	__builtin_memcpy(h->tcp, sc->orig, 60);
	bpf_ringbuf_submit(h, 0);
	count(V_HANDSHAKE);
	return 1;
}

/* Find the socket of a leg, or the one that listens for it, to be given back with bpf_sk_release(). struct tuple and struct
 * tuple4 have the layout of struct bpf_sock_tuple. */
static __always_inline struct bpf_sock *socket_at(struct __sk_buff *skb, const struct tuple *t, int v6)
{
	struct tuple4 k = key4(t);

	if (v6)
		return bpf_skc_lookup_tcp(skb, (void *)t, sizeof(*t), BPF_F_CURRENT_NETNS, 0);
	return bpf_skc_lookup_tcp(skb, (void *)&k, sizeof(k), BPF_F_CURRENT_NETNS, 0);
}

/* Find the socket that would get the segment. */
static __always_inline struct bpf_sock *socket_of(struct __sk_buff *skb, const struct scratch *sc)
{
	return socket_at(skb, &sc->t, sc->v6);
}

/* Return the state (BPF_TCP_*) of a socket that was found, or 0 if there is none, and give it back. */
static __always_inline __u32 state_of(struct bpf_sock *sk)
{
	__u32 state;

	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

static __always_inline __u32 socket_state(struct __sk_buff *skb, const struct scratch *sc)
{
	return state_of(socket_of(skb, sc));
}

/* Is there a socket for this connection, and not just a listening one? */
static __always_inline int has_socket(struct __sk_buff *skb, const struct scratch *sc)
{
	__u32 state = socket_state(skb, sc);

	return state && state != BPF_TCP_LISTEN;
}

/* Is that a socket that a SYN must not replace? A request socket and one in TIME-WAIT do not count. */
static __always_inline int is_live(__u32 state)
{
	return state && state != BPF_TCP_LISTEN && state != BPF_TCP_TIME_WAIT && state != BPF_TCP_NEW_SYN_RECV;
}

static __always_inline int has_live_socket(struct __sk_buff *skb, const struct scratch *sc)
{
	return is_live(socket_state(skb, sc));
}

/* Is there such a socket for the other leg? */
__noinline int other_has_live_socket(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();

	return sc ? is_live(state_of(socket_at(skb, &sc->other, !tuple_is_v4(&sc->other)))) : 0;
}

/* Read how far the local socket has sent (may_be_behind()), and what it expects. Nothing is read while a process works on it:
 * what arrives then waits until the process is done. The socket may be sending just then: the acknowledgement may arrive before
 * the segment is counted, but waits as well. Returns 1 if a process works on it. */
__noinline int ask_socket(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct bpf_sock *sk;
	struct tcp_sock *tp;
	int busy = 0;

	if (!sc)
		return 0;
	sc->s.socket_known = 0;
	sk = socket_of(skb, sc);
	if (!sk)
		return 0;
	tp = sk->state == BPF_TCP_LISTEN ? NULL : bpf_skc_to_tcp_sock(sk);
	if (tp) {
		busy = !!*(volatile int *)&tp->inet_conn.icsk_inet.sk.sk_lock.owned;
		sc->s.socket_sent = tp->snd_nxt;
		sc->s.socket_next = tp->rcv_nxt;
		sc->s.socket_known = !busy;
	}
	bpf_sk_release(sk);
	return busy;
}

/* Report a segment to a transparent connection's socket if the socket is gone: the host has not received our reset. The kernel
 * answers no segment to an address that is not its own, so user space resets the host again. */
__noinline int report_deserted(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();

	if (sc && !has_socket(skb, sc) && may_answer(&sc->t, ANSWER_RESET))
		tell(&sc->t, EVENT_DESERTED);
	return 0;
}

/* Is this a client that shakes hands with a server? An RST from a local socket belongs to an earlier attempt
 * then, whose process has died. The client would take it for an answer to its SYN. */
static __always_inline int is_shaking_hands(const struct scratch *sc)
{
	const struct embryo *e = bpf_map_lookup_elem(&embryos, &sc->t);

	return e && e->opts_in & OPT_END_TO_END;
}

/* A segment between hosts of whose handshake we only believe that it has begun: whoever forges a SYN can make us believe so of a
 * connection that is routed past us, and has nothing to do with that SYN. The segment goes on whole, as through any router. The
 * handshake goes on as well: this segment may be the forged one. */
static __always_inline int pass_by(struct __sk_buff *skb, struct scratch *sc)
{
	sc->transparent = 0; /* not for a socket */
	if (set_aside(skb))
		return drop(V_REWRITE_FAILED);
	count(V_PASSED_BY);
	return TCX_NEXT;
}

/* Is this a segment of a host that takes part in no handshake? Others are for user space. */
static __always_inline int is_ordinary(const struct scratch *sc)
{
	return !(sc->s.flags & (TH_SYN | TH_RST));
}

/* Has the client completed its handshake with the server? l: the server's leg. If its socket was recreated, `peer` is not set. */
static __always_inline int has_client(const struct leg *l)
{
	return l->flags & LEG_RESTORED || bpf_map_lookup_elem(&legs, &l->peer);
}

/* Is this the leg to a server whose client has not completed the handshake? A client's leg has no peer before it is paired. If
 * the client's record is gone, another SYN may have taken its place: that has another number than the one that the server got.
 * A client without a record may also have found no room for it (OPT_FULL). */
static __always_inline int is_opening(const struct leg *l)
{
	struct embryo *e;

	if ((l->flags & (LEG_END_TO_END | LEG_PAIRED)) != LEG_END_TO_END || !l->peer.rport || has_client(l))
		return 0;
	e = bpf_map_lookup_elem(&embryos, &l->peer);
	return e && e->irs == l->iss && !(e->opts_in & OPT_FULL);
}

#endif
