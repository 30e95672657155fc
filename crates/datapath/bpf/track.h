/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From the SYN to a leg: which connections are tracked, and what their handshakes have negotiated. A connection that user
 * space opens gets its leg before the SYN leaves, since user space chooses the port. A client's leg is created when the client
 * completes the handshake, so a SYN flood fills an LRU table only. */
#ifndef LONGSPLICE_TRACK_H
#define LONGSPLICE_TRACK_H

#include <asm-generic/errno-base.h>
#include "clock.h"
#include "handshake.h"
#include "sum.h"
#include "table.h"
#include "verdict.h"

/* The options of a SYN or SYN-ACK. opts: as embryo.opts_in; tsval: 0 without timestamps. */
struct syn_options {
	__u16 mss;
	__u8 wscale, opts;
	__u32 tsval;
};

/* Read MSS, window scale, SACK permitted, timestamps and ECN of the SYN or SYN-ACK in sc->orig. A global function, so that the
 * verifier checks it once. */
__noinline int parse_syn(struct __sk_buff *skb, struct syn_options *o)
{
	struct scratch *sc = scratch();
	__u32 v;
	int i;

	if (!sc || !o)
		return 0;
	parse_options(skb);
	o->mss = sc->v6 ? 1220 : 536; /* default if there is no option (RFC 9293, 3.7.1) */
	o->wscale = 0;
	o->opts = sc->s.has_ts ? LEG_TS : 0;
	if ((sc->s.flags & (TH_ECE | TH_CWR)) == (sc->s.flags & TH_ACK ? TH_ECE : TH_ECE | TH_CWR)) /* RFC 3168, 6.1.1 */
		o->opts |= OPT_ECN;
	o->tsval = sc->s.has_ts ? sc->s.tsval : 0;
	sc->cursor = 20;
	bpf_for(i, 0, 40) {
		__u32 at = sc->cursor, kind, len;

		if (at >= sc->doff || at >= MAX_TCP_HDR)
			break;
		at = cap(at);
		kind = sc->orig[at];
		if (kind == 0)
			break;
		if (kind == 1) {
			sc->cursor = at + 1;
			continue;
		}
		len = sc->orig[at + 1];
		if (len < 2 || at + len > sc->doff)
			break;
		if (kind == 2 && len == 4) {
			v = sc->orig[at + 2] << 8 | sc->orig[at + 3];
			o->mss = v;
		}
		if (kind == 3 && len == 3) {
			v = sc->orig[at + 2];
			o->wscale = v > 14 ? 14 : v; /* RFC 7323, 2.3 */
			o->opts |= OPT_WSCALE;
		}
		if (kind == 4 && len == 2)
			o->opts |= LEG_SACK;
		sc->cursor = at + len;
	}
	return 0;
}

/* Remove AccECN from a SYN, or from the SYN-ACK to one of ours, so that both ends fall back to RFC 3168 (ecn.h). Our socket
 * may have asked for AccECN. So a SYN-ACK keeps only the one combination of flags that means RFC 3168; the others might mean
 * AccECN to the socket. Returns 0, or a negative number. */
__noinline int classic_ecn(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	__be16 old, now;
	__u32 at;

	if (!sc)
		return -1;
	__builtin_memcpy(&old, sc->orig + 12, 2);
	now = old & ~bpf_htons(0x0100); /* AE */
	if (sc->s.flags & TH_ACK && (sc->s.flags & (TH_ECE | TH_CWR)) != TH_ECE)
		now &= ~bpf_htons(TH_ECE | TH_CWR);
	if (old == now)
		return 0;
	at = ETH_LEN + sc->ihl;
	if (bpf_skb_store_bytes(skb, at + 12, &now, 2, 0))
		return -1;
	return bpf_l4_csum_replace(skb, at + TCP_CSUM_AT, old, now, 2);
}

/* Take options out of a SYN or SYN-ACK: overwrite them with NOPs. opts: LEG_TS, LEG_SACK. After parse_syn(). Returns 0, or a
 * negative number. */
__noinline int withhold(struct __sk_buff *skb, __u32 opts)
{
	struct scratch *sc = scratch();
	__u32 n, l4, out = 0;
	__s64 diff;
	int i;

	if (!sc)
		return -1;
	n = cap(sc->doff) & 60;
	if (n <= 20)
		return 0;
	l4 = ETH_LEN + sc->ihl;
	__builtin_memcpy(sc->old, sc->orig, 64);
	__builtin_memcpy(sc->new, sc->orig, 64);
	sc->cursor = 20;
	bpf_for(i, 20, 60) {
		__u32 at = cap(i), kind, len;

		if (at >= n)
			break;
		if (at == sc->cursor) { /* an option begins */
			kind = sc->orig[at];
			len = kind == 1 ? 1 : sc->orig[at + 1];
			if (kind == 0 || len == 0)
				break;
			sc->cursor = at + len;
			out = (kind == 8 && opts & LEG_TS) || (kind == 4 && opts & LEG_SACK);
		}
		if (out)
			sc->new[at] = 1;
	}
	diff = bpf_csum_diff((void *)sc->old, n, (void *)sc->new, n, 0);
	n = cap(n - 21) + 1; /* as in parse_options() */
	if (n > 40 || diff < 0 || bpf_skb_store_bytes(skb, l4 + 20, sc->new + 20, n, 0))
		return -1;
	return bpf_l4_csum_replace(skb, l4 + TCP_CSUM_AT, 0, diff, 0);
}

/* Record in the leg what SYN and SYN-ACK have negotiated. */
static __always_inline void agree(struct leg *l, __u8 in, __u8 out, __u8 wscale_in, __u8 wscale_out)
{
	__u8 both = in & out;

	l->flags &= ~(LEG_SYN | LEG_TS | LEG_SACK);
	l->flags |= (both & (LEG_TS | LEG_SACK)) | (both & OPT_ECN ? LEG_ECN : 0) | LEG_TRACKED;
	l->wscale_in = both & OPT_WSCALE ? wscale_in : 0;
	l->wscale_out = both & OPT_WSCALE ? wscale_out : 0;
}

/* Return the enum listens of the packet's destination, or 0 if nothing listens there. */
static __always_inline __u32 listened(const struct scratch *sc)
{
	struct listen_key k = { .port = sc->t.lport, .family = sc->v6 ? 6 : 4 };

	__builtin_memcpy(k.local, sc->t.local, 16);
	return listens_at(&k);
}

/* Create leg and path entry of a client that has completed its handshake. Returns 1, 0 if there is no room, or 2 if another
 * processor does so with another segment: that one alone tells user space, and takes care of the embryo. */
static __always_inline int hatch(struct scratch *sc, const struct embryo *e)
{
	struct leg l = {};
	int r;

	l.iss = e->iss;
	l.mss_in = e->mss_in;
	l.mss_out = e->mss_out;
	agree(&l, e->opts_in, e->opts_out, e->wscale_in, e->wscale_out);
	if (e->opts_in & OPT_TRANSPARENT)
		l.flags |= LEG_TRANSPARENT;
	if (e->opts_in & OPT_END_TO_END)
		l.flags |= LEG_END_TO_END;
	if (e->opts_in & OPT_WAITS)
		l.flags |= LEG_WAITS;
	l.max_in = l.ack_out = l.ack_local = e->irs + 1;
	l.max_out = l.local_out = l.ack_in = e->iss + 1;
	l.edge_in = l.ack_in + ((__u32)sc->s.win << l.wscale_in);
	l.edge_out = e->edge_out;
	l.win_out = l.win_local = e->edge_out - l.ack_out;
	l.tsval_in = l.floor_in = e->tsval_in;
	l.tsval_out = e->tsval_out;
	l.ifindex = e->ifindex;
	__builtin_memcpy(l.dmac, e->dmac, 6);
	__builtin_memcpy(l.smac, e->smac, 6);
	l.seen = bpf_ktime_get_coarse_ns();
	compare_clocks(&l, sc->s.has_ts ? sc->s.tsval : e->tsval_in, l.seen);
	r = bpf_map_update_elem(&legs, &sc->t, &l, BPF_NOEXIST);
	if (r == -EEXIST)
		return 2;
	if (!r && !insert_path(&sc->t))
		return 1;
	bpf_map_delete_elem(&legs, &sc->t);
	count(V_TABLE_FULL);
	return 0;
}

/* Would the kernel complete the handshake with this segment (tcp_check_req())? It need not be the first one: the
 * acknowledgement that ends the handshake and the data behind it may have been lost. */
static __always_inline int completes(const struct embryo *e, const struct seg *s)
{
	__u32 next = e->irs + 1, end = s->seq + s->len + !!(s->flags & TH_FIN);

	return e->iss && s->ack == e->iss + 1 &&
	       (s->seq == next || (after(end, next) && before(s->seq, e->edge_out)) || (s->seq == e->edge_out && end == s->seq));
}

/* A fragment, or a segment behind an extension header, from a host that has no path entry. The kernel must not complete a
 * handshake with it: the leg's numbers would lack its bytes. So a fragment is dropped, and the host answers the next SYN-ACK.
 * A client whose segments have extension headers would never complete the handshake, so it is not tracked. */
__noinline int before_leg(int parsed)
{
	struct scratch *sc = scratch();
	struct embryo *e;

	if (!sc)
		return TCX_NEXT;
	e = bpf_map_lookup_elem(&embryos, &sc->t);
	if (!e || !e->iss || sc->s.flags & (TH_SYN | TH_RST))
		return TCX_NEXT;
	if (parsed != PARSED_EXTENSION || e->opts_in & OPT_END_TO_END)
		return drop(parsed == PARSED_TINY ? V_FRAGMENT_TINY : V_FRAGMENT);
	if (completes(e, &sc->s))
		bpf_map_delete_elem(&embryos, &sc->t);
	return TCX_NEXT;
}

/* Does the client that sends this SYN shake hands with a server? Returns OPT_END_TO_END, perhaps with other options, or 0. With a
 * listening socket, it does unless user space has given the SYN back (`again`), or another socket must decide. Without one, the
 * process is dead, and the kernel refuses the connection. known: of an earlier SYN. */
static __always_inline __u32 end_to_end(struct __sk_buff *skb, const struct scratch *sc, __u32 listens,
					const struct embryo *known)
{
	__u32 opts = OPT_END_TO_END | (listens & LISTENS_WAITS ? OPT_WAITS : 0);

	listens &= ~LISTENS_WAITS;
	if (listens == LISTENS_TRANSPARENT)
		return OPT_TRANSPARENT | opts;
	if (listens != LISTENS_END_TO_END || sc->s.again)
		return 0;
	if (known && known->irs == sc->s.seq && !(known->opts_in & OPT_FULL))
		return known->opts_in & (OPT_END_TO_END | OPT_WAITS);
	return socket_state(skb, sc) == BPF_TCP_LISTEN ? opts : 0;
}

/* Is the handshake one of a transparent connection? Its sockets have the addresses of both hosts. */
static __always_inline int is_between_hosts(const struct embryo *e)
{
	return (e->opts_in & (OPT_TRANSPARENT | OPT_END_TO_END)) == (OPT_TRANSPARENT | OPT_END_TO_END);
}

/* Track a segment from a host that has no path entry. Returns 1 if it has a leg now, 2 if it must be dropped, and 0 to leave
 * it to the stack. A global function, to keep it out of the stack frame of ingress(). */
__noinline int track_ingress(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct embryo *known = NULL;
	__u32 listens;

	if (!sc)
		return 0;
	listens = listened(sc);
	if (!listens && !sc->taken)
		return 0;
	if ((sc->s.flags & (TH_SYN | TH_ACK | TH_RST)) == TH_SYN) {
		struct syn_options o = {};
		struct embryo e = {};
		__u32 opts;

		known = bpf_map_lookup_elem(&embryos, &sc->t);
		opts = end_to_end(skb, sc, listens, known);
		if (!opts && classic_ecn(skb)) {
			count(V_REWRITE_FAILED);
			return 2;
		}
		if (known && known->iss && known->irs != sc->s.seq && has_socket(skb, sc)) {
			/* another SYN does not end a handshake, since it may be forged */
			return is_between_hosts(known) && pass_by(skb, sc) == TCX_DROP ? 2 : 0;
		}
		parse_syn(skb, &o);
		e.irs = sc->s.seq;
		e.mss_in = o.mss;
		e.wscale_in = o.wscale;
		e.opts_in = o.opts | opts | (sc->taken ? OPT_TRANSPARENT : 0);
		if (known && known->irs == e.irs) /* a retransmission may omit ECN (RFC 3168, 6.1.1.1) */
			e.opts_in |= known->opts_in & OPT_ECN;
		if (known && known->irs == e.irs && known->opts_out & OPT_PASSED) {
			e.opts_out = OPT_PASSED;
			e.edge_out = known->edge_out;
		}
		e.tsval_in = o.tsval;
		bpf_map_update_elem(&embryos, &sc->t, &e, BPF_ANY);
		if (opts) {
			report_handshake(skb);
			return 2;
		}
		return 0;
	} else if ((sc->s.flags & (TH_SYN | TH_ACK | TH_RST)) == TH_ACK) {
		known = bpf_map_lookup_elem(&embryos, &sc->t);
		if (known && completes(known, &sc->s) && tcp_sum_right(skb)) {
			__u32 opts = known->opts_in;
			int room = hatch(sc, known);

			if (room == 2)
				return 1;
			/* Without a leg, no segment would find the sockets. User space lets the hosts go on without them. */
			if (!room && is_between_hosts(known)) {
				report_handshake(skb);
				return 2;
			}
			if (opts & OPT_END_TO_END && !report_handshake(skb)) { /* lost: the next segment reports it */
				bpf_map_delete_elem(&legs, &sc->t);
				remove_path(&sc->t);
				return 2;
			}
			if (!room) { /* keep the embryo until the next SYN: user space reads OPT_FULL */
				known->iss = 0;
				known->opts_in = OPT_FULL;
				return 0;
			}
			bpf_map_delete_elem(&embryos, &sc->t);
			return 1; /* the segment may carry data: process it as the leg's first */
		}
		/* Another processor may have created the leg since the look-up. If the segment passed unseen, max_in would be
		 * too low, and a later bound would be wrong. */
		if (!known)
			return !!bpf_map_lookup_elem(&legs, &sc->t);
	} else if (sc->s.flags & TH_RST) {
		known = bpf_map_lookup_elem(&embryos, &sc->t);
		/* Report any RST until the server has answered: the server may have an earlier connection of this port, which
		 * the client resets. Afterwards, only one in order. And none if the hosts have gone on without us: as their data. */
		if (known && known->opts_in & OPT_END_TO_END &&
		    (known->iss ? sc->s.seq == known->irs + 1 : !(known->opts_out & OPT_PASSED))) {
			/* The handshake is over. The client's next SYN must not overtake this RST on its way through user space. */
			if (report_handshake(skb) && is_between_hosts(known))
				known->iss = known->opts_out = 0; /* without an answer, the bits mean other things */
			return 2;
		}
	}
	if (known && is_between_hosts(known)) {
		if (known->iss)
			return pass_by(skb, sc) == TCX_DROP ? 2 : 0;
		/* The client has an answer already, which we have not seen. If this is true, the server's next one is a repetition,
		 * and the connection must not be tracked from there on: bytes have passed. */
		if (is_ordinary(sc) && !(known->opts_out & OPT_PASSED)) {
			known->edge_out = sc->s.ack;
			known->opts_out = OPT_PASSED;
		}
		count(V_PASSED_BY);
	}
	return 0;
}

/* Record our SYN-ACK in the embryo. */
__noinline int track_egress(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct syn_options o = {};
	struct embryo *e;

	if (!sc)
		return 0;
	e = bpf_map_lookup_elem(&embryos, &sc->t);
	if (!e || e->opts_in & OPT_FULL || sc->s.ack != e->irs + 1)
		return 0;
	parse_syn(skb, &o);
	e->iss = sc->s.seq;
	e->mss_out = o.mss;
	e->wscale_out = o.wscale;
	e->opts_out = o.opts;
	e->tsval_out = o.tsval;
	e->edge_out = sc->s.ack + sc->s.win;
	e->ifindex = skb->ifindex;
	bpf_skb_load_bytes(skb, 0, e->dmac, 6);
	bpf_skb_load_bytes(skb, 6, e->smac, 6);
	return 0;
}

/* Record our SYN. */
static __always_inline void record_syn(struct leg *l, const struct scratch *sc, const struct syn_options *o)
{
	__u32 before = l->iss == sc->s.seq ? l->verbatim & OPT_ECN : 0; /* as in track_ingress() */

	l->iss = sc->s.seq;
	l->max_out = l->local_out = sc->s.seq + 1;
	l->ack_in = sc->s.seq;
	l->mss_out = o->mss;
	l->wscale_out = o->wscale;
	l->shim_ts = 0;
	l->tsval_out = o->tsval;
	/* `verbatim` keeps our options until the SYN-ACK says which of them are accepted */
	l->verbatim = o->opts | before;
}

/* Our SYN in a connection that user space opens: take out what the client has not negotiated, and record the rest in the leg.
 * `l` has LEG_SYN. From the answer, our socket concludes that the server has refused it. Returns 0, or a negative number. */
static __always_inline int own_syn(struct __sk_buff *skb, struct leg *l)
{
	struct scratch *sc = scratch();
	struct syn_options o = {};
	__u32 not_offered;

	if (!sc || classic_ecn(skb))
		return -1;
	parse_syn(skb, &o);
	not_offered = o.opts & ~l->flags & (LEG_TS | LEG_SACK);
	if (not_offered && withhold(skb, not_offered))
		return -1;
	o.opts &= ~not_offered;
	bpf_spin_lock(&l->lock);
	record_syn(l, sc, &o);
	bpf_spin_unlock(&l->lock);
	return 0;
}

/* Record the SYN-ACK to it. */
static __always_inline void own_syn_ack(struct leg *l, const struct scratch *sc, const struct syn_options *o)
{
	if (sc->s.ack != l->iss + 1)
		return;
	l->mss_in = o->mss;
	agree(l, o->opts, l->verbatim, o->wscale, l->wscale_out);
	l->max_in = l->ack_out = l->ack_local = sc->s.seq + 1;
	l->ack_in = sc->s.ack;
	l->edge_in = sc->s.ack + sc->s.win;
	l->edge_out = l->ack_out + 65535; /* an upper limit, until our first ACK */
	l->tsval_in = l->floor_in = o->tsval;
}

/* Take out of the SYN-ACK what our SYN has not offered: our socket thinks that it has. Returns 0, or a negative number. */
static __always_inline int only_offered(struct __sk_buff *skb, const struct leg *l, const struct syn_options *o)
{
	__u32 not_offered = o->opts & ~l->verbatim & (LEG_TS | LEG_SACK);

	return not_offered ? withhold(skb, not_offered) : 0;
}

#endif
