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

#define ROOM_FOR_TS 32 /* length of a TCP header with timestamps, bytes */

/* Turn a SYN or RST into a question for the other host, as planned by path_ask() or ask_other(): a segment without payload, whose
 * only options are timestamps, if e->stamp. Its header may have to grow. Where the kernel does not allow that (cut_off()), the
 * question has no timestamps. Returns 0, or a negative number. */
__noinline int question(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__u32 i, l4, n;

	if (!sc || trim(skb, 0, 0))
		return -1;
	sc->ts_at = sc->sack_at = 0;
	bpf_for(i, 20, MAX_TCP_HDR)
		sc->orig[cap(i)] = 1; /* NOP: overwrite the other options */
	if (!sc->p.f.stamp)
		return 0;
	l4 = ETH_LEN + sc->ihl;
	n = sc->doff;
	if (n < ROOM_FOR_TS) {
		__builtin_memset(sc->old, 0, 64);
		n = cap(n) & 60;
		if (n < 20 || bpf_skb_load_bytes(skb, l4, sc->old, n))
			return -1;
		if (bpf_skb_change_tail(skb, l4 + ROOM_FOR_TS, 0))
			return 0;
		if (bpf_skb_store_bytes(skb, l4, sc->old, ROOM_FOR_TS, 0) || /* zeros change no checksum */
		    bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, bpf_htons(n), bpf_htons(ROOM_FOR_TS), BPF_F_PSEUDO_HDR | 2))
			return -1;
		sc->doff = ROOM_FOR_TS;
		sc->orig[12] = (sc->orig[12] & 15) | ROOM_FOR_TS << 2;
		sc->pkt_len = sc->ihl + ROOM_FOR_TS;
	}
	sc->orig[22] = 8; /* timestamps (RFC 7323, 3.2) */
	sc->orig[23] = 10;
	sc->ts_at = 22;
	return 0;
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
	skb->mark = sc->transparent ? MARK_TRANSPARENT : MARK_LOCAL;
	if (bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
		count(V_REWRITE_FAILED);
	skb->mark = 0;
	count(V_BOTH);
	return emit_forward(skb, 0);
}

#endif
