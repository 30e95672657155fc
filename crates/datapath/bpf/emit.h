/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Send the copies of a segment: one for the local socket, one for the other host. If both are sent, the first one is a clone.
 * A copy that must be cut is sent last, because cutting destroys the bytes. */
#ifndef LONGSPLICE_EMIT_H
#define LONGSPLICE_EMIT_H

#include "handshake.h"
#include "record.h"
#include "rewrite.h"
#include "verdict.h"

static __always_inline __u32 ports_of(const struct tuple *t)
{
	return (__u32)t->lport | (__u32)t->rport << 16;
}

/* Pass the socket's copy up. touched: the packet is as the forwarded clone has left it, and not as it arrived. */
__noinline int emit_local(struct __sk_buff *skb, int touched)
{
	struct scratch *sc = scratch();

	if (!sc)
		return TCX_DROP;
	if (touched && (rewrite_ip(skb, 0, sc->ttl) || bpf_skb_store_bytes(skb, 0, sc->mac, 12, 0)))
		return drop(V_REWRITE_FAILED);
	if (rewrite_tcp(skb, 0, touched ? (__u32)sc->t.rport | (__u32)sc->t.lport << 16 : 0) || trim(skb, sc->p.l.keep, 1))
		return drop(V_REWRITE_FAILED);
	count(touched ? V_BOTH : V_LOCAL);
	return TCX_NEXT;
}

/* Set the next hop of the forwarded copy from the record of the leg where it leaves. */
static __always_inline void next_hop(struct scratch *sc, const struct leg *o)
{
	sc->ifindex = o->ifindex;
	__builtin_memcpy(sc->hop, o->dmac, 6);
	__builtin_memcpy(sc->hop + 6, o->smac, 6);
}

/* Send the other host's copy, as a clone or as the packet itself. */
__noinline int emit_forward(struct __sk_buff *skb, int clone)
{
	struct scratch *sc = scratch();

	if (!sc)
		return TCX_DROP;
	if (rewrite_tcp(skb, 1, ports_of(&sc->other)) || rewrite_ip(skb, 1, sc->ttl - 1) ||
	    bpf_skb_store_bytes(skb, 0, sc->hop, 12, 0) || trim_padding(skb, sc))
		return drop(V_REWRITE_FAILED);
	if (clone)
		return bpf_clone_redirect(skb, sc->ifindex, 0);
	if (trim(skb, sc->p.f.keep, 0))
		return drop(V_REWRITE_FAILED);
	return bpf_redirect(sc->ifindex, 0);
}

/* Send both copies. */
__noinline int emit_both(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();

	if (!sc)
		return TCX_DROP;
	if (sc->p.f.keep >= sc->s.len) {
		if (bpf_skb_load_bytes(skb, 0, sc->mac, 12))
			return drop(V_REWRITE_FAILED);
		if (emit_forward(skb, 1) < 0)
			count(V_REWRITE_FAILED);
		return emit_local(skb, 1);
	}
	if (is_straddle(&sc->s, &sc->p)) {
		count(V_STRADDLE);
		return emit_local(skb, 0);
	}
	if (rewrite_tcp(skb, 0, 0))
		return drop(V_REWRITE_FAILED);
	skb->mark = sc->foreign ? MARK_FOREIGN : MARK_LOCAL;
	if (bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
		count(V_REWRITE_FAILED);
	skb->mark = 0;
	count(V_BOTH);
	return emit_forward(skb, 0);
}

#endif
