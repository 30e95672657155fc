/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Is the connection of a tunnel alive, over, or over beyond doubt? Its socket says, and what its packets have shown. */
#ifndef LONGSPLICE_TPOT_ENDS_H
#define LONGSPLICE_TPOT_ENDS_H

#include "tpot_packet.h"

/* Return the state of the connection's socket, or of a request of one; 0: none. A listening one is none: its address may be any,
 * and its port the server's. struct tuple and struct tuple4 have the layout of struct bpf_sock_tuple. */
__noinline int socket_state(struct __sk_buff *skb, const struct tuple *t, int v6)
{
	struct bpf_sock *sk;
	int state;

	if (!t)
		return 0;
	if (v6) {
		sk = bpf_skc_lookup_tcp(skb, (void *)t, sizeof(*t), BPF_F_CURRENT_NETNS, 0);
	} else {
		struct tuple4 k = { t->remote[3], t->local[3], t->rport, t->lport };

		sk = bpf_skc_lookup_tcp(skb, (void *)&k, sizeof(k), BPF_F_CURRENT_NETNS, 0);
	}
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state == BPF_TCP_LISTEN ? 0 : state;
}

static __always_inline int has_socket(struct __sk_buff *skb, const struct packet *p)
{
	return socket_state(skb, &p->t, p->v6);
}

/* Is there a socket that has not ended? There is none for a released connection. */
static __always_inline int is_alive(struct __sk_buff *skb, const struct packet *p)
{
	int state = socket_state(skb, &p->t, p->v6);

	return state && state != BPF_TCP_TIME_WAIT;
}

/* Note that a packet of the connection has passed. Written to about once a second, since all processors share the entry. */
static __always_inline void note(struct tpot_tunnel *tn)
{
	__u64 at = now();

	if (at - tn->seen > SECOND)
		tn->seen = at;
}

/* The sequence number behind a segment. */
static __always_inline __u32 end_of(struct __sk_buff *skb, const struct packet *p)
{
	__u32 len = skb->len - p->l4;
	__u16 said = 0;

	bpf_skb_load_bytes(skb, p->l3 + (p->v6 ? 4 : 2), &said, 2);
	if (said) /* otherwise a large packet without a length (BIG TCP) */
		len = bpf_ntohs(said) - (p->v6 ? 0 : p->l3_len);
	return p->seq + len - p->doff + !!(p->flags & TH_FIN);
}

/* Note a packet that has arrived. Anybody may have forged it. So a FIN counts as proven when the other side has acknowledged it,
 * an acknowledgement if it is of our FIN exactly, and an RST if it has the number that we expect (RFC 5961, 3.2). Who asks
 * whether the connection is over without proof looks for its socket as well. */
static __always_inline void note_arrival(struct __sk_buff *skb, struct tpot_tunnel *tn, const struct packet *p)
{
	__u32 end = 0;

	note(tn);
	if (p->flags & TH_FIN) {
		tn->fin_in = end_of(skb, p);
		end = TPOT_FIN_IN;
	}
	if (p->flags & TH_RST && p->seq == tn->ack)
		end |= TPOT_RST | TPOT_RST_EXACT;
	else if (p->flags & TH_RST && is_alive(skb, p))
		end |= TPOT_RST;
	if (p->flags & TH_ACK && tn->flags & TPOT_FIN_OUT && p->ack == tn->fin_out && !(tn->flags & TPOT_FIN_OUT_ACKED))
		end |= TPOT_FIN_OUT_ACKED;
	if (end)
		__sync_fetch_and_or(&tn->flags, end);
}

static __always_inline void note_departure(struct __sk_buff *skb, struct tpot_tunnel *tn, const struct packet *p)
{
	__u32 end = p->flags & TH_RST ? TPOT_RST | TPOT_RST_EXACT : 0;

	note(tn);
	if (p->flags & TH_ACK)
		tn->ack = p->ack;
	if (p->flags & TH_FIN) {
		tn->fin_out = end_of(skb, p);
		end |= TPOT_FIN_OUT;
	}
	if (p->flags & TH_ACK && tn->flags & TPOT_FIN_IN && p->ack == tn->fin_in && !(tn->flags & TPOT_FIN_IN_ACKED))
		end |= TPOT_FIN_IN_ACKED;
	if (end)
		__sync_fetch_and_or(&tn->flags, end);
	if (!(p->flags & TH_RST) && tn->flags & TPOT_RST) /* it was no valid one */
		__sync_fetch_and_and(&tn->flags, ~(TPOT_RST | TPOT_RST_EXACT));
}

/* Is the connection over, as far as packets show that anybody may have forged? */
static __always_inline int is_over(const struct tpot_tunnel *tn)
{
	return tn->flags & TPOT_RST || (tn->flags & (TPOT_FIN_IN | TPOT_FIN_OUT)) == (TPOT_FIN_IN | TPOT_FIN_OUT);
}

/* Is it over indeed? A spliced connection that was released has no socket, and lives on in the data path. So whoever removes a
 * tunnel before the data path has judged the packet needs proof. state: of its socket. */
static __always_inline int is_proven_over(const struct tpot_tunnel *tn, int state)
{
	return state == BPF_TCP_TIME_WAIT || tn->flags & TPOT_RST_EXACT ||
	       (tn->flags & (TPOT_FIN_IN_ACKED | TPOT_FIN_OUT_ACKED)) == (TPOT_FIN_IN_ACKED | TPOT_FIN_OUT_ACKED);
}

#endif
