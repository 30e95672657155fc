/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Fragments of spliced flows (RFC 791, 3.2; RFC 8200, 4.5), as a router sees them: nothing is reassembled, nothing is held.
 *
 * A first fragment with the whole TCP header is rewritten as any segment is: checksums are corrected by difference, and so do not
 * ask for the bytes that follow. What it is remains in `fragment_trains`, where its later fragments find it; they get
 * addresses, and go the same way. Only the last one tells how long the segment is: then, and once, its bytes
 * count in path.word, and its FIN.
 *
 * Identifications are given anew. Many hosts become one here, our own address, and two of them may have chosen the same
 * number: a receiver would mix their datagrams up (RFC 6864, 5.3.1).
 *
 * There is no way back for a flow that has had fragments forwarded (PATH_FRAGMENTS): a segment that is sent again across the
 * bound of an unsplice would have to be cut in two, which takes all of it. User space refuses (Keeper::next), and a trigger
 * is ignored. Should a flow be taken back all the same, since the alternative is to lose it, the rest of a train is dropped
 * (fragment-late), and what is sent again from the bound on reaches the socket.
 *
 * Refused, each with a verdict: a first fragment without the whole TCP header (RFC 1858, 3.2), a later one that reaches into it
 * (RFC 3128), what would have to change its family, and what does not fit the way out. A later one that comes before its first,
 * or too late, cannot be told from one of a connection that is not spliced, and is left to the stack (fragment-stray). */
#ifndef LONGSPLICE_FRAGMENT_H
#define LONGSPLICE_FRAGMENT_H

#include "emit.h"
#include "fast.h"
#include "icmp.h"

/* Receivers give up after 60 s at most (RFC 8200, 4.5); RFC 791, 3.2, recommends 15 s. The shorter one, since 16 bits of
 * identification come round soon. */
#define TRAIN_LIFETIME 15000000000ull

static __always_inline struct train_key train_key(const struct scratch *sc)
{
	struct train_key k;

	__builtin_memcpy(k.remote, sc->t.remote, 16);
	__builtin_memcpy(k.local, sc->t.local, 16);
	k.id = sc->frag_id;
	return k;
}

/* The number was given again, to a segment that is not forwarded. */
static __always_inline void forget_train(const struct scratch *sc)
{
	struct train_key k = train_key(sc);

	bpf_map_delete_elem(&fragment_trains, &k);
}

/* The next identification between two addresses: a counter for some of all pairs, from where nobody knows (RFC 7739). */
static __always_inline __u32 next_id(const struct tuple *out)
{
	__u64 h = stir(hash_seed, (__u64)(out->remote[0] ^ out->remote[2]) << 32 | (out->remote[1] ^ out->remote[3]));
	__u32 *n, bucket;

	h = stir(h, (__u64)(out->local[0] ^ out->local[2]) << 32 | (out->local[1] ^ out->local[3]));
	bucket = (h >> 32) % MAX_IDENTS;
	n = bpf_map_lookup_elem(&idents, &bucket);
	if (!n)
		return 0;
	if (!*n)
		__sync_val_compare_and_swap(n, 0, bpf_get_prandom_u32());
	return (__u32)h + __sync_fetch_and_add(n, 1);
}

/* IP header, identification, and, of a first fragment, what the addresses are to the TCP checksum. */
__noinline int rewrite_fragment(struct __sk_buff *skb, __u32 id, int first)
{
	struct scratch *sc = scratch();
	__s64 diff;
	__u32 l4;

	if (!sc)
		return -1;
	if (sc->v6) {
		struct ipv6hdr *ip6 = (void *)sc->new;
		__be32 be = bpf_htonl(id);

		__builtin_memcpy(sc->new, sc->l3, 40);
		if (sc->p.f.strip_ecn)
			sc->new[1] &= ~(ECN_BITS << 4);
		ip6->hop_limit--;
		__builtin_memcpy(&ip6->saddr, sc->other.local, 16);
		__builtin_memcpy(&ip6->daddr, sc->other.remote, 16);
		diff = bpf_csum_diff((void *)sc->l3 + 8, 32, (void *)sc->new + 8, 32, 0);
		if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, 40, 0) || bpf_skb_store_bytes(skb, ETH_LEN + 44, &be, 4, 0))
			return -1;
		l4 = ETH_LEN + 48;
	} else {
		struct iphdr *ip = (void *)sc->new;

		if (sc->ihl > 20) { /* as in rewrite_ip() */
			if (bpf_skb_adjust_room(skb, 20 - (__s32)sc->ihl, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO))
				return -1;
			sc->pkt_len -= sc->ihl - 20;
			sc->ihl = 20;
		}
		__builtin_memcpy(sc->new, sc->l3, 20);
		if (sc->p.f.strip_ecn)
			sc->new[1] &= ~ECN_BITS;
		sc->new[0] = 0x45;
		ip->tot_len = bpf_htons(sc->pkt_len);
		ip->id = bpf_htons((__u16)id);
		ip->ttl--;
		ip->saddr = sc->other.local[3];
		ip->daddr = sc->other.remote[3];
		ip->check = 0;
		ip->check = ~fold(bpf_csum_diff(0, 0, (void *)sc->new, 20, 0));
		diff = bpf_csum_diff((void *)sc->l3 + 12, 8, (void *)sc->new + 12, 8, 0);
		if (bpf_skb_store_bytes(skb, ETH_LEN, sc->new, 20, 0))
			return -1;
		l4 = ETH_LEN + 20;
	}
	return first ? bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, 0, diff, BPF_F_PSEUDO_HDR) : 0;
}

static __always_inline int send_fragment(struct __sk_buff *skb, const struct via *v, __u32 id, int first)
{
	if (rewrite_fragment(skb, id, first) || bpf_skb_store_bytes(skb, 0, v->dmac, 12, 0))
		return drop(V_REWRITE_FAILED);
	count(V_FRAGMENT_FORWARDED);
	return leave_by(v);
}

/* Without the IP options, which stay here. */
static __always_inline __u32 fragment_size(const struct scratch *sc)
{
	return sc->v6 ? sc->pkt_len : sc->pkt_len - sc->ihl + 20;
}

/* Its sender is told as of any segment; what follows the IP header is quoted. */
static __always_inline int fragment_too_big(struct __sk_buff *skb, struct scratch *sc, __u32 mtu)
{
	if ((!sc->v6 && sc->ihl != 20) || !may_answer(&sc->t, ANSWER_TOO_BIG))
		return drop(V_OVERSIZE);
	if (sc->v6) {
		sc->ihl = 40;
		if (bpf_skb_load_bytes(skb, ETH_LEN + 40, sc->orig, 20))
			return drop(V_REWRITE_FAILED);
	}
	return answer_too_big(skb, mtu);
}

/* Bytes of the segment and its FIN, which its last fragment tells. 0: done; 1: no longer SPLICED; -1: gave up; -2: out of
 * window. */
static __always_inline int train_complete(struct path *p, struct path *rev, union path_word w, const struct train *t,
					  __u32 total)
{
	struct seg s = { .seq = t->seq, .len = total - t->doff, .flags = t->fin ? TH_FIN : 0 };

	if (!path_in_window(w, rev, &s))
		return -2;
	if (!s.len && !t->fin)
		return 0;
	return sent_to(p, rev, w, s.seq + s.len + t->fin, t->fin);
}

/* sc->t has a path that was SPLICED when it was looked up. Returns RETRY when it no longer is. */
__noinline int first_fragment(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct train t = {}, *known;
	struct path *p, *rev;
	struct train_key k;
	struct via *v = NULL;
	union path_word w;
	enum step step;
	__u32 refused;
	int r;

	if (!sc)
		return TCX_DROP;
	p = way_out(sc, &v);
	if (!p || !v)
		return drop(V_NO_PEER);
	w.all = *(volatile __u64 *)&p->word.all;
	if (w.flags & PATH_DEAD)
		return TCX_NEXT; /* as in fast_ingress() */
	if (is_crossed(sc))
		return drop(V_FRAGMENT_CROSS);
	if (sc->s.flags & (TH_SYN | TH_RST))
		return drop(V_FRAGMENT); /* nobody has to cut these up */
	rev = find_path(&sc->other);
	if (!rev)
		return drop(V_NO_PEER);
	refused = path_refuses(p, w, rev, &sc->s);
	if (refused)
		return drop(refused);
	if (sc->ttl <= 1)
		return drop(V_TTL);
	if (v->mtu && fragment_size(sc) > v->mtu)
		return fragment_too_big(skb, sc, v->mtu);

	/* Before the first byte leaves: an unsplice finds either the mark or no fragment. */
	r = advance_path(p, w.end, PATH_FRAGMENTS, 0);
	if (r)
		return r > 0 ? RETRY : drop(V_STALE_CPU);
	if (!(rev->word.flags & PATH_FRAGMENTS))
		__sync_fetch_and_or(&rev->word.all, (__u64)PATH_FRAGMENTS << 48);

	t.when = bpf_ktime_get_coarse_ns();
	t.seq = sc->s.seq;
	t.rport = sc->t.rport;
	t.lport = sc->t.lport;
	t.out_rport = sc->other.rport;
	t.out_lport = sc->other.lport;
	t.doff = sc->doff;
	t.fin = !!(sc->s.flags & TH_FIN);
	k = train_key(sc);
	known = bpf_map_lookup_elem(&fragment_trains, &k);
	if (known && known->seq == t.seq && known->out_lport == t.out_lport && known->out_rport == t.out_rport &&
	    t.when - known->when < TRAIN_LIFETIME)
		t.id = known->id; /* came twice: the others follow either */
	else
		t.id = next_id(&sc->other);
	if (sc->more && bpf_map_update_elem(&fragment_trains, &k, &t, BPF_ANY))
		return drop(V_REWRITE_FAILED);
	parse_options(skb);
	/* an atomic fragment (RFC 6946) is a segment */
	step = path_step(p, rev, w, NULL, &sc->s, !sc->more, seen_at(t.when), &sc->p);
	if (sc->p.events)
		tell_all(&sc->t, sc->p.events);
	if (step == STEP_RECORD)
		return sc->more ? drop(V_STALE_CPU) : RETRY;
	if (step == STEP_DROP) /* with its mark: the later ones are of no use then */
		return drop(sc->p.dropped);
	if (rewrite_tcp(skb, 1, ports_of(&sc->other)))
		return drop(V_REWRITE_FAILED);
	return send_fragment(skb, v, t.id, 1);
}

__noinline int later_fragment(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct train_key k;
	struct via *v = NULL;
	union path_word w;
	struct train *t;
	struct path *p, *rev;
	int r;
	__u32 end;

	if (!sc)
		return TCX_NEXT;
	k = train_key(sc);
	t = bpf_map_lookup_elem(&fragment_trains, &k);
	if (!t || bpf_ktime_get_coarse_ns() - t->when > TRAIN_LIFETIME) {
		count(V_FRAGMENT_STRAY);
		return TCX_NEXT;
	}
	sc->t.rport = t->rport;
	sc->t.lport = t->lport;
	p = way_out(sc, &v);
	if (!p || !v || is_crossed(sc) || sc->other.rport != t->out_rport || sc->other.lport != t->out_lport)
		return drop(V_FRAGMENT_LATE); /* another flow by now */
	rev = find_path(&sc->other);
	w.all = *(volatile __u64 *)&p->word.all;
	if (!rev || !(w.flags & PATH_SPLICED) || w.flags & PATH_DEAD)
		return drop(V_FRAGMENT_LATE);
	end = sc->frag_at + sc->pkt_len - sc->ihl;
	if (sc->frag_at < t->doff || end + (sc->v6 ? 0 : 20) > 65535)
		return drop(V_FRAGMENT_OVERLAP);
	if (sc->ttl <= 1)
		return drop(V_TTL);
	if (v->mtu && fragment_size(sc) > v->mtu) {
		may_answer(&sc->t, ANSWER_TOO_BIG); /* no answer without the TCP header, but user space hears of it */
		return drop(V_OVERSIZE);
	}
	if (!sc->more) {
		r = train_complete(p, rev, w, t, end);
		if (r)
			return drop(r > 0 ? V_FRAGMENT_LATE : r == -1 ? V_STALE_CPU : V_OUT_OF_WINDOW);
	}
	advance_ack(p, p->max_ack, 0, seen_at(bpf_ktime_get_coarse_ns())); /* the time */
	if (path_loses(w, sc->s.ecn, t->seq, end - t->doff))
		return drop(V_CE_DROPPED);
	sc->p.f.strip_ecn = !(w.flags & PATH_ECN);
	return send_fragment(skb, v, t->id, 0);
}

#endif
