/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Fragments of spliced flows (RFC 791, 3.2; RFC 8200, 4.5) are forwarded as by a router: nothing is reassembled or held.
 *
 * A first fragment with the whole TCP header is rewritten like any segment. Checksums are updated incrementally, so the bytes in
 * later fragments are not needed. An entry in `fragment_trains` describes the segment to its later fragments, which get the new
 * addresses and go the same way. Only the last fragment gives the length of the segment. Then, and once, its bytes and its FIN
 * count in path.word.
 *
 * Identifications are replaced. Many hosts share our address behind the splice, and a receiver would mix up the fragments of two
 * hosts that chose the same number (RFC 6864, 5.3.1).
 *
 * A flow that had fragments forwarded does not go back to control mode (PATH_FRAGMENTS): a segment that is retransmitted across
 * the bound of an unsplice would have to be cut in two, which takes the whole segment. User space refuses (Keeper::next), and a
 * trigger is ignored. If the flow has to be taken back because it would be lost otherwise, the remaining fragments of a segment
 * are dropped (fragment-late), and retransmissions from the bound on reach the socket.
 *
 * Refused, each with a verdict of its own: a first fragment without the whole TCP header (RFC 1858, 3.2), a later one that
 * reaches into the header (RFC 3128), one that would change the address family, and one that does not fit the outgoing link. A
 * later fragment that arrives before its first, or too late, looks like one of a connection that is not spliced, and is left to
 * the stack (fragment-stray). */
#ifndef LONGSPLICE_FRAGMENT_H
#define LONGSPLICE_FRAGMENT_H

#include "emit.h"
#include "fast.h"
#include "icmp.h"

/* How long an entry is valid, ns. Receivers give up reassembly after 60 s at most (RFC 8200, 4.5), and RFC 791, 3.2,
 * recommends 15 s. The shorter time is better, since identifications of 16 bits wrap soon. */
#define TRAIN_LIFETIME 15000000000ull

static __always_inline struct train_key train_key(const struct scratch *sc)
{
	struct train_key k;

	__builtin_memcpy(k.remote, sc->t.remote, 16);
	__builtin_memcpy(k.local, sc->t.local, 16);
	k.id = sc->frag_id;
	return k;
}

/* Remove the entry of this identification, which is now that of a segment that is not forwarded. */
static __always_inline void forget_train(const struct scratch *sc)
{
	struct train_key k = train_key(sc);

	bpf_map_delete_elem(&fragment_trains, &k);
}

/* Return the next identification for a pair of addresses. Pairs share counters by hash, which begin at random numbers (RFC
 * 7739). */
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

/* Rewrite the IP header and the identification, and in a first fragment update the TCP checksum for the new addresses. Returns
 * 0, or a negative number. */
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

/* Length of the forwarded fragment, without IP options, which are removed; bytes. */
static __always_inline __u32 fragment_size(const struct scratch *sc)
{
	return sc->v6 ? sc->pkt_len : sc->pkt_len - sc->ihl + 20;
}

/* Drop a first fragment that does not fit, and tell its sender as for any segment. The error quotes the bytes that follow the IP
 * header. */
static __always_inline int fragment_too_big(struct __sk_buff *skb, struct scratch *sc, __u32 mtu)
{
	if (mtu < LEAST_TOLD) {
		is_due(&sc->t, ANSWER_TOO_BIG); /* reports EVENT_OVERSIZE */
		return drop(V_OVERSIZE);
	}
	if ((!sc->v6 && sc->ihl != 20) || !may_answer(&sc->t, ANSWER_TOO_BIG))
		return drop(V_OVERSIZE);
	if (sc->v6) {
		sc->ihl = 40;
		if (bpf_skb_load_bytes(skb, ETH_LEN + 40, sc->orig, 20))
			return drop(V_REWRITE_FAILED);
	}
	return answer_too_big(skb, mtu);
}

/* Record the bytes and the FIN of a segment when its last fragment has arrived. total: length of TCP header and payload.
 * Returns 0 if done, 1 if the entry was stopped, -1 after too many lost races, and -2 if the segment is out of the window. */
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

/* Forward a first fragment, or a segment with a fragment header. sc->t had an entry in force at the look-up. Returns RETRY if
 * it has been stopped since. */
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
		return drop(V_NO_HOP);
	w.all = *(volatile __u64 *)&p->word.all;
	if (w.flags & PATH_DEAD)
		return TCX_NEXT; /* the kernel answers it once the socket is gone: an RST cannot be made of a fragment */
	if (is_crossed(sc))
		return drop(V_FRAGMENT_CROSS);
	if (sc->s.flags & (TH_SYN | TH_RST))
		return drop(V_FRAGMENT); /* these have no reason to be fragmented */
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

	/* Set the flag before the first byte leaves: an unsplice finds either the flag or no fragments. */
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
	t.generation = generation(&sc->t);
	k = train_key(sc);
	known = bpf_map_lookup_elem(&fragment_trains, &k);
	if (known && known->seq == t.seq && known->out_lport == t.out_lport && known->out_rport == t.out_rport &&
	    t.when - known->when < TRAIN_LIFETIME)
		t.id = known->id; /* a duplicate: the later fragments belong to either */
	else
		t.id = next_id(&sc->other);
	if (sc->more && bpf_map_update_elem(&fragment_trains, &k, &t, BPF_ANY))
		return drop(V_REWRITE_FAILED);
	parse_options(skb);
	/* An atomic fragment (RFC 6946) is a whole segment. */
	step = step_on_path(p, rev, w.all, !sc->more);
	if (sc->p.events)
		tell_all(&sc->t, sc->p.events);
	if (step == STEP_RECORD)
		return sc->more ? drop(V_STALE_CPU) : RETRY;
	if (step == STEP_DROP) /* CE-marked, for instance: the later fragments are useless then */
		return drop(sc->p.dropped);
	if (rewrite_tcp(skb, 1, ports_of(&sc->other)))
		return drop(V_REWRITE_FAILED);
	return send_fragment(skb, v, t.id, 1);
}

/* Forward a later fragment, if the entry of its first one is known and valid. */
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
	if (!p || !v || is_crossed(sc) || sc->other.rport != t->out_rport || sc->other.lport != t->out_lport ||
	    !is_meant(&sc->t, t->generation))
		return drop(V_FRAGMENT_LATE); /* the ports belong to another flow by now */
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
		may_answer(&sc->t, ANSWER_TOO_BIG); /* reports EVENT_OVERSIZE; no answer without a TCP header */
		return drop(V_OVERSIZE);
	}
	if (!sc->more) {
		r = train_complete(p, rev, w, t, end);
		if (r)
			return drop(r > 0 ? V_FRAGMENT_LATE : r == -1 ? V_STALE_CPU : V_OUT_OF_WINDOW);
	}
	advance_ack(p, p->max_ack, 0, seen_at(bpf_ktime_get_coarse_ns())); /* for path.seen */
	if (path_loses(w, sc->s.ecn, t->seq, end - t->doff))
		return drop(V_CE_DROPPED);
	sc->p.f.strip_ecn = !(w.flags & PATH_ECN);
	return send_fragment(skb, v, t->id, 0);
}

#endif
