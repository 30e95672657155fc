/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A new connection takes the place of one that is over, from the same port (RFC 6191). */
#ifndef LONGSPLICE_REPLACE_H
#define LONGSPLICE_REPLACE_H

#include "emit.h"
#include "fast.h"
#include "path.h"

/* What begin_anew() does with the flow's other leg, sc->other. */
enum other_leg {
	OTHER_NONE,     /* there is none */
	OTHER_GOES,     /* its entries go, or its late segments would enter the new connection */
	OTHER_IS_RESET, /* its record goes; its host may not have got the reset, and is answered with another one */
};

/* Read where the connection of a record ends. With a stack frame of its own. p: its entry, or NULL. */
static __noinline int read_end(struct leg *l, const struct path *p, struct replaced *last)
{
	struct half h = {};
	__u64 origin;

	read_positions(&h, &last->end, &origin, l, p);
	last->flags = h.flags;
	return 0;
}

/* Remove a leg's entries, and tell user space to whom they belonged. other: enum other_leg. OTHER_NONE: this is the leg of the
 * SYN, which is the last. The other leg goes first, and user space is told that one follows. If that is reset, its path entry
 * stays, so that its host is still reset (reset_again()), until user space forgets the flow. */
static __noinline int replace(const struct tuple *t, int other)
{
	struct replaced last = { .more = other != OTHER_NONE };
	struct leg *l = bpf_map_lookup_elem(&legs, t);

	if (l)
		read_end(l, find_path(t), &last);
	submit(t, EVENT_REPLACED, &last, other == OTHER_NONE ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
	bpf_map_delete_elem(&legs, t);
	return other == OTHER_IS_RESET ? 0 : remove_path(t);
}

/* Give the SYN in the packet way: the connection of its leg is over, so a new one from the same port can begin (RFC 6191). The
 * entries of the old one go, and its flow is told. The socket of the old connection may still be there, since its segments were
 * forwarded past it, and user space has not heard of the end yet. It would challenge the SYN, and the client would have to send
 * that again after a second. So the socket gets an RST, and the SYN arrives once more behind it. other: enum other_leg. */
__noinline int begin_anew(struct __sk_buff *skb, int other)
{
	struct scratch *sc = scratch();

	if (!sc)
		return TCX_NEXT;
	/* While a process works on the socket, what has arrived before waits for it, and nobody knows what the socket will expect
	 * after that. It would ignore the RST, and live on without the record. */
	if (ask_socket(skb))
		return drop(V_SYN);
	if (other)
		replace(&sc->other, other);
	replace(&sc->t, OTHER_NONE);
	/* the program of TPOT has seen a SYN in a tunnel, and must not see it again */
	if (sc->taken || !sc->s.socket_known || bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
		return RETRY;
	sc->p.l.seq = sc->s.socket_next;
	sc->p.l.flags = TH_RST;
	sc->p.l.win = sc->p.l.urg = 0;
	sc->p.l.strip_ecn = 1;
	sc->p.l.keep = 0;
	sc->ts_at = sc->sack_at = 0;
	return emit_local(skb, 0);
}

#endif
