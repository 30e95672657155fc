/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The short way of forwarding mode. It rewrites packets of the common layouts in place: no TCP options, or timestamps, or
 * timestamps and SACK, as Linux lays them out. It uses no lock, no scratch space, and almost no helpers but look-ups.
 * Everything unusual is left to the general way (fast_ingress() in splice.bpf.c), which produces the same packet. The short
 * way runs in the tcx program, and also as an XDP program on devices that the user names (xdp.h). */
#ifndef LONGSPLICE_FAST_H
#define LONGSPLICE_FAST_H

#include "offload.h"
#include "step.h"
#include "sum.h"
#include "tail.h"
#include "table.h"
#include "verdict.h"

/* Return codes beside those of tcx programs: what to do with the packet next. */
#define RETRY (-2)   /* the flow was committed or stopped meanwhile: dispatch again */
#define UNUSUAL (-3) /* not for the short way */
#define SLOW (-4)    /* for slow_ingress() */
#define UNKNOWN (-5) /* no path entry: for track_ingress() or before_leg() */
#define FIRST (-6)   /* for first_fragment() */
#define PASSES (-7)  /* no path entry, and nobody listens at its destination */
#define ADMITTED (-8) /* slow_ingress() goes on with the segment */

#define LAYOUT_TS bpf_htonl(0x0101080a)   /* NOP NOP timestamps */
#define LAYOUT_SACK bpf_htonl(0x01010500) /* NOP NOP SACK, length to be added */

/* A packet, as tcx or XDP describes it. */
struct frame {
	void *data, *end; /* the bytes that can be accessed directly, from the Ethernet header on */
	__u32 len;        /* length without the Ethernet header, bytes */
	__u32 segment;    /* super-packet: payload of each of its segments, bytes; otherwise 0 */
	__u32 summed;     /* who has computed the checksum (sum.h) */
	__u32 needs;      /* VIA_* flags that the outgoing device must have */
	__u32 list;       /* 1 for a list of segments (offload.h) */
	__u32 ip_len;     /* out: length of the IP packet, bytes; padding follows it */
	__u8 ecn;         /* out: ECN_BITS of the IP header */
	__u8 unmarked;    /* out: 1 if they are to be cleared */
	__u8 unknown;     /* out: 1 if the packet has no path entry */
	struct __sk_buff *skb; /* what describes it: this, or `xdp` */
	struct xdp_md *xdp;
};

/* Find the TCP header afresh. What is known of the packet by now, up to where it can be accessed and which options it has, would
 * have the verifier follow the rest once for each case. Returns NULL if it cannot be accessed. */
static __always_inline struct tcphdr *tcp_again(struct frame *f, __u32 ip_hdr)
{
	struct tcphdr *th;

	if (f->skb) {
		f->data = (void *)(long)*(volatile __u32 *)&f->skb->data;
		f->end = (void *)(long)*(volatile __u32 *)&f->skb->data_end;
	} else {
		f->data = (void *)(long)*(volatile __u32 *)&f->xdp->data;
		f->end = (void *)(long)*(volatile __u32 *)&f->xdp->data_end;
	}
	th = f->data + ETH_LEN + ip_hdr;
	return (void *)(th + 1) <= f->end ? th : NULL;
}

/* Add n to a word of the packet, and return the change for its checksum. */
static __always_inline __u64 add_to(__be32 *at, __u32 n)
{
	__be32 old = *at;

	*at = bpf_htonl(bpf_ntohl(old) + n);
	return delta(old, *at);
}

/* Is the TCP checksum of a segment without payload right? addresses: the sum of both IP addresses. The header has one of the
 * lengths that fast_tcp() admits, and it looks at no more than their ends: after each, the verifier has two cases to follow. */
static __always_inline int short_sum_right(const struct tcphdr *th, const void *end, __u32 doff, __u64 addresses)
{
	const __u32 *w = (const void *)th;
	__u64 sum = addresses + bpf_htons(IPPROTO_TCP) + bpf_htons(doff);

	sum += (__u64)w[0] + w[1] + w[2] + w[3] + w[4];
	if (doff >= 32 && (void *)(w + 8) <= end)
		sum += (__u64)w[5] + w[6] + w[7];
	if (doff >= 44 && (void *)(w + 11) <= end)
		sum += (__u64)w[8] + w[9] + w[10];
	if (doff >= 52 && (void *)(w + 13) <= end)
		sum += (__u64)w[11] + w[12];
	if (doff == 60 && (void *)(w + 15) <= end)
		sum += (__u64)w[13] + w[14];
	return fold(sum) == 0xffff;
}

/* Check the segment, record it in the path entry, and rewrite the TCP header and its checksum. pseudo: the change of the
 * checksum by the new addresses. addresses: the sum of the old ones. Returns UNUSUAL before anything in the packet was
 * written. */
static __always_inline int fast_tcp(struct frame *f, struct tcphdr *th, struct path *p, struct via *v, __u32 ip_hdr,
				    __u64 pseudo, __u64 addresses)
{
	void *end = f->end;
	union path_word w = { .all = *(volatile __u64 *)&p->word.all };
	__be32 *opt = (void *)(th + 1);
	__u32 doff = th->doff * 4, flags = ((__u8 *)th)[13], len, win;
	int unmark = !(w.flags & PATH_ECN);
	struct seg s = {};
	__u64 sum = 0;

	if ((flags & ~0xc8) != TH_ACK || f->summed == SUMMED_COMPLETE)
		return UNUSUAL; /* ACK, perhaps PSH, ECE, CWR */
	if (w.flags & (PATH_DEAD | PATH_PEER_FIN | PATH_CROSS | PATH_TRACE))
		return UNUSUAL;
	if (w.flags & (PATH_STRIP_TS | PATH_STRIP_SACK) && doff != 20)
		return UNUSUAL;
	if (unmark && f->ecn == ECN_CE)
		return UNUSUAL;
	f->unmarked = f->ecn && unmark;
	if (f->needs & ~v->flags || f->list)
		return UNUSUAL;
	if (f->ip_len < ip_hdr + doff || f->ip_len > f->len)
		return UNUSUAL;
	if (doff == 32) {
		if ((void *)(opt + 3) > end || opt[0] != LAYOUT_TS)
			return UNUSUAL;
	} else if (doff != 20) {
		if (doff < 44 || (void *)(opt + 6) > end || opt[0] != LAYOUT_TS ||
		    opt[3] != (LAYOUT_SACK | bpf_htonl(doff - 34)) || doff == 48 || doff == 56)
			return UNUSUAL;
		if (doff >= 52 && (void *)(opt + 8) > end)
			return UNUSUAL;
		if (doff == 60 && (void *)(opt + 10) > end)
			return UNUSUAL;
	}
	len = f->ip_len - ip_hdr - doff;
	if (v->mtu && ip_hdr + doff + (f->segment ? f->segment : len) > v->mtu)
		return UNUSUAL;
	s.seq = bpf_ntohl(th->seq);
	s.ack = bpf_ntohl(th->ack_seq);
	s.len = len;
	s.flags = flags;
	win = bpf_ntohs(th->window);
	/* The first proof of step.h. Segments out of order need the second one, which takes the entry of the other direction. */
	if (!path_is_next(p, w, &s))
		return UNUSUAL;
	/* A damaged segment must not acknowledge anything. Damaged data in order may count: it is retransmitted. */
	if (after(s.ack, p->max_ack) && f->summed != SUMMED_DONE && f->summed != SUMMED_PARTIAL &&
	    (len || !short_sum_right(th, end, doff, addresses)))
		return UNUSUAL;
	th = tcp_again(f, ip_hdr);
	if (!th)
		return UNUSUAL;
	end = f->end;
	opt = (void *)(th + 1);
	doff = th->doff * 4;
	/* One try each: after a lost race, the general way makes more. A bare acknowledgement does not move `end`, as in
	 * host_segment(). */
	if (len && try_advance_path(p, s.seq + len, 0, 1))
		return UNUSUAL;
	if (try_advance_ack(p, s.ack, win, seen_at(bpf_ktime_get_coarse_ns())))
		return UNUSUAL;
	if (unmark && flags & (TH_ECE | TH_CWR)) {
		((__u8 *)th)[13] = flags & ~(TH_ECE | TH_CWR);
		sum += delta(bpf_htons(flags & (TH_ECE | TH_CWR)), 0);
	} else if (w.flags & PATH_IDENTITY) {
		return 0;
	}

	sum += delta(*(__u32 *)th, (__u32)p->lport | (__u32)p->rport << 16);
	th->source = p->lport;
	th->dest = p->rport;
	sum += add_to(&th->seq, p->seq_add);
	sum += add_to(&th->ack_seq, p->ack_add);
	win = bpf_htons(window_field(win << (p->scales & 15), p->scales >> 4));
	sum += delta(th->window, win);
	th->window = win;
	if (doff >= 32 && (void *)(opt + 3) <= end) {
		sum += add_to(&opt[1], p->tsval_add);
		sum += add_to(&opt[2], p->tsecr_add);
	}
	if (doff >= 44 && (void *)(opt + 6) <= end) {
		sum += add_to(&opt[4], p->ack_add);
		sum += add_to(&opt[5], p->ack_add);
	}
	if (doff >= 52 && (void *)(opt + 8) <= end) {
		sum += add_to(&opt[6], p->ack_add);
		sum += add_to(&opt[7], p->ack_add);
	}
	if (doff == 60 && (void *)(opt + 10) <= end) {
		sum += add_to(&opt[8], p->ack_add);
		sum += add_to(&opt[9], p->ack_add);
	}
	if (f->summed == SUMMED_PARTIAL)
		th->check = fold(pseudo + th->check); /* the sum of the pseudo-header, not complemented */
	else
		th->check = ~fold(sum + pseudo + (__u16)~th->check);
	return 0;
}

/* Rewrite the packet. Returns its next hop, or NULL if the packet is unusual; nothing in it was written then. */
static __always_inline struct via *forward4(struct frame *f)
{
	struct iphdr *ip = f->data + ETH_LEN;
	struct tcphdr *th = (void *)(ip + 1);
	__u32 *word = (void *)ip;
	struct tuple4 k;
	struct path4 *p;
	struct via *v;
	__u64 pseudo, sum;
	__u32 via;

	if ((void *)(th + 1) > f->end || *(__u8 *)ip != 0x45 || ip->protocol != IPPROTO_TCP ||
	    ip->frag_off & bpf_htons(0x3fff) || ip->ttl <= 1 || !ip->tot_len)
		return NULL;
	if (fold((__u64)word[0] + word[1] + word[2] + word[3] + word[4]) != 0xffff)
		return NULL; /* a broken header must change no state (RFC 1812, 5.2.2) */
	k.remote = ip->saddr;
	k.local = ip->daddr;
	k.rport = th->source;
	k.lport = th->dest;
	p = find4(&k);
	f->unknown = !p;
	if (!p || !(p->p.word.flags & PATH_SPLICED))
		return NULL;
	via = path_via(&p->p);
	v = bpf_map_lookup_elem(&vias, &via);
	if (!v)
		return NULL;
	pseudo = delta(ip->saddr, v->local[3]) + delta(ip->daddr, p->p.remote4);
	f->ip_len = bpf_ntohs(ip->tot_len);
	f->ecn = ip->tos & ECN_BITS;
	if (fast_tcp(f, th, &p->p, v, sizeof(*ip), pseudo, (__u64)ip->saddr + ip->daddr))
		return NULL;
	ip = f->data + ETH_LEN;
	/* The TTL is the high byte of its 16-bit word. */
	sum = pseudo + delta(bpf_htons((__u16)ip->ttl << 8), bpf_htons((__u16)(ip->ttl - 1) << 8));
	ip->ttl--;
	if (f->unmarked) {
		sum += delta(bpf_htons(f->ecn), 0);
		ip->tos &= ~ECN_BITS;
	}
	ip->saddr = v->local[3];
	ip->daddr = p->p.remote4;
	ip->check = ~fold(sum + (__u16)~ip->check);
	__builtin_memcpy(f->data, v->dmac, 12);
	return v;
}

static __always_inline struct via *forward6(struct frame *f)
{
	struct ipv6hdr *ip = f->data + ETH_LEN;
	struct tcphdr *th = (void *)(ip + 1);
	struct tuple k;
	struct path6 *p;
	struct via *v;
	__u64 pseudo = 0, addresses = 0;
	__u32 via, i;
	__u32 *from, *to;

	if ((void *)(th + 1) > f->end || *(__u8 *)ip >> 4 != 6 || ip->nexthdr != IPPROTO_TCP || ip->hop_limit <= 1 || !ip->payload_len)
		return NULL;
	__builtin_memcpy(k.remote, &ip->saddr, 16);
	__builtin_memcpy(k.local, &ip->daddr, 16);
	k.rport = th->source;
	k.lport = th->dest;
	p = find6(&k);
	f->unknown = !p;
	if (!p || !(p->p.word.flags & PATH_SPLICED))
		return NULL;
	via = path_via(&p->p);
	v = bpf_map_lookup_elem(&vias, &via);
	if (!v)
		return NULL;
	if (p->remote[0] == 0 && p->remote[1] == 0 && p->remote[2] == MAPPED_PREFIX)
		return NULL; /* leaves as IPv4 */
	from = (void *)&ip->saddr;
#pragma clang loop unroll(full)
	for (i = 0; i < 4; i++) {
		pseudo += delta(from[i], v->local[i]) + delta(from[4 + i], p->remote[i]);
		addresses += (__u64)from[i] + from[4 + i];
	}
	f->ip_len = bpf_ntohs(ip->payload_len) + sizeof(*ip);
	f->ecn = ip->flow_lbl[0] >> 4 & ECN_BITS; /* the traffic class begins in the byte before flow_lbl */
	if (fast_tcp(f, th, &p->p, v, sizeof(*ip), pseudo, addresses))
		return NULL;
	ip = f->data + ETH_LEN;
	ip->hop_limit--;
	if (f->unmarked)
		ip->flow_lbl[0] &= ~(ECN_BITS << 4);
	to = (void *)&ip->saddr;
	__builtin_memcpy(to, v->local, 16);
	__builtin_memcpy(to + 4, p->remote, 16);
	__builtin_memcpy(f->data, v->dmac, 12);
	return v;
}

/* Send a forwarded packet, from tcx. bpf_redirect_peer() delivers it to the veth's other end in the same receive round, past
 * the queue and the programs on the egress of the device. */
static __always_inline int leave_by(const struct via *v)
{
	return v->flags & VIA_PEER ? bpf_redirect_peer(v->ifindex, 0) : bpf_redirect(v->ifindex, 0);
}

/* ---- tcx. fast4() and fast6() are global functions: the verifier checks each of them once, on its own. ---- */

static __always_inline struct frame frame_of(struct __sk_buff *skb)
{
	return (struct frame){ (void *)(long)skb->data, (void *)(long)skb->data_end, skb->len - ETH_LEN, skb->gso_size,
			       summed(skb), .list = is_list(skb), .skb = skb };
}

/* Give the packet headers of its own, if it shares its memory with the copy of a sender on this machine. Otherwise a receiver on
 * this machine could not join it to the segment before, and would handle each by itself. IP forwarding does the same. Only for a
 * segment among many (no PSH), and not for a super-packet, which is joined already. If there is no memory, the packet is sent as
 * it is. */
static __always_inline void unclone(struct __sk_buff *skb, const struct frame *f, __u32 ip_hdr)
{
	struct tcphdr *th = f->data + ETH_LEN + ip_hdr;

	if (cloned(skb) && !f->segment && (void *)(th + 1) <= f->end && !th->psh)
		bpf_skb_change_head(skb, 0, 0);
}

/* Cut off the padding, count the packet and send it. */
static __always_inline int forwarded(struct __sk_buff *skb, const struct frame *f, const struct via *v)
{
	if (f->ip_len < f->len && cut_off(skb, ETH_LEN + f->ip_len, 0)) /* padding belongs to one link */
		return drop(V_REWRITE_FAILED);
	count_only(V_FORWARDED);
	return leave_by(v);
}

__noinline int fast4(struct __sk_buff *skb)
{
	struct frame f = frame_of(skb);
	struct via *v = forward4(&f);
	struct iphdr *ip = f.data + ETH_LEN;
	struct tcphdr *th = (void *)(ip + 1);

	if (!v && f.unknown && (void *)(th + 1) <= f.end) {
		struct listen_key k = { { 0, 0, MAPPED_PREFIX, ip->daddr }, th->dest, 4 };

		return listens_at(&k) ? UNUSUAL : PASSES;
	}
	if (!v)
		return UNUSUAL;
	unclone(skb, &f, sizeof(struct iphdr));
	return forwarded(skb, &f, v);
}

__noinline int fast6(struct __sk_buff *skb)
{
	struct frame f = frame_of(skb);
	struct via *v = forward6(&f);
	struct ipv6hdr *ip = f.data + ETH_LEN;
	struct tcphdr *th = (void *)(ip + 1);

	if (!v && f.unknown && (void *)(th + 1) <= f.end) {
		struct listen_key k = { .port = th->dest, .family = 6 };

		__builtin_memcpy(k.local, &ip->daddr, 16);
		return listens_at(&k) ? UNUSUAL : PASSES;
	}
	if (!v)
		return UNUSUAL;
	unclone(skb, &f, sizeof(struct ipv6hdr));
	return forwarded(skb, &f, v);
}

/* ---- the general way ---- */

/* path_step() for the segment in the scratch space, once for all that call it: the verifier comes to them with twenty different
 * states. word: union path_word, as it was checked. Returns enum step; the plan is in the scratch space. */
__noinline int step_on_path(struct path *p, struct path *rev, __u64 word, int whole)
{
	union path_word w = { .all = word };
	struct scratch *sc = scratch();
	struct leg *l = NULL;

	if (!sc || !p || !rev)
		return STEP_DROP;
	if (sc->s.flags & TH_RST)
		l = bpf_map_lookup_elem(&legs, &sc->t);
	return path_step(p, rev, w, l, &sc->s, whole, seen_at(bpf_ktime_get_coarse_ns()), &sc->p);
}

#endif
