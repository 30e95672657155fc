// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The entry points of the data path: parse -> look up -> decide -> rewrite -> redirect.
 *
 * ingress: a packet from a host. Its tuple is looked up among the path entries (paths4, paths6). Packets without an entry pass
 *   as if no program were attached, unless they belong to a handshake (track.h). An entry with PATH_SPLICED holds everything
 *   needed to rewrite and forward the packet (fast_*). That takes no lock, and writes only to the entry of this direction,
 *   FINs and RSTs aside. For any other entry, the leg's record decides (slow_*): control mode, splice, unsplice.
 * egress: a segment from a local socket. The look-up is the same. Shims are applied; the socket of a forwarded flow is muted.
 * switch_flow, path_entry (calls.h): called by user space to splice, commit, unsplice and release.
 *
 * One atomic word per direction, path.word, separates fast from slow. The fast path advances it by compare-and-swap, and only
 * while it says PATH_SPLICED. So clearing that flag stops the direction at an exact position, which becomes the bound of the
 * unsplice. Packet or user space, the first to find the path stopped derives the leg's record from it (wake()).
 */
#include <linux/if_packet.h>
#include "prefetch.h"
#include "adopt.h"
#include "calls.h"
#include "emit.h"
#include "fragment.h"
#include "guard.h"
#include "hold.h"
#include "icmp.h"
#include "record.h"
#include "replace.h"
#include "tap.h"
#include "trace.h"
#include "track.h"
#include "unsplice.h"
#include "wake.h"
#include "xdp.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* ---- slow path: control mode, switching, switching back ---- */

/* The largest IP packet that may be sent to the host of `o`, bytes. */
static __always_inline __u32 mtu_towards(struct __sk_buff *skb, const struct scratch *sc, const struct leg *o)
{
	__u32 most = headers(sc, 20) + o->mss_in, mtu = 0;

	if (bpf_check_mtu(skb, o->ifindex, &mtu, 0, 0) < 0)
		mtu = 0;
	return o->mss_in && (!mtu || most < mtu) ? most : mtu;
}

/* Do the hosts of sc->t and sc->other see each other's addresses, as those of a transparent connection do? */
static __always_inline int is_mirrored(const struct scratch *sc)
{
	int i;

	for (i = 0; i < 4; i++)
		if (sc->t.remote[i] != sc->other.local[i] || sc->t.local[i] != sc->other.remote[i])
			return 0;
	return sc->t.rport == sc->other.lport && sc->t.lport == sc->other.rport;
}

/* Does `rev` belong to the flow of sc->t, as the entry of the leg where its packets leave? */
static __always_inline int leads_back(const struct scratch *sc, const struct path *rev)
{
	return rev->rport == sc->t.rport && rev->lport == sc->t.lport;
}

static __always_inline int as_it_came(void)
{
	count(V_LOCAL);
	return TCX_NEXT;
}

/* Send the planned answer, a segment without payload, to the sender of the packet that it is made of. */
__noinline int answer(struct __sk_buff *skb, __u32 verdict)
{
	struct scratch *sc = scratch();

	if (!sc)
		return TCX_DROP;
	if (question(skb) || bpf_skb_load_bytes(skb, 0, sc->mac, 12))
		return drop(V_REWRITE_FAILED);
	sc->other = sc->t;
	sc->ttl = 64 + 1; /* emit_forward() takes one off */
	sc->ifindex = skb->ifindex;
	__builtin_memcpy(sc->hop, sc->mac + 6, 6);
	__builtin_memcpy(sc->hop + 6, sc->mac, 6);
	count(verdict);
	return emit_forward(skb, 0);
}

/* Answer a SYN in a switch with a challenge ACK (RFC 5961, 4.2). If its host has forgotten the connection, it answers with a
 * reset, which ends the flow, and the next SYN begins anew. The socket may be muted, or gone with its process, but the record has
 * the numbers. */
static __always_inline int challenge_here(struct __sk_buff *skb, struct scratch *sc, struct leg *l)
{
	count(V_SYN);
	if (!may_answer(&sc->t, ANSWER_CHALLENGE))
		return drop(V_CHALLENGE_LIMITED);
	bpf_spin_lock(&l->lock);
	challenge_by_record(l, &sc->p.f);
	bpf_spin_unlock(&l->lock);
	return answer(skb, V_CHALLENGE);
}

/* A SYN or RST outside of forwarding mode. */
__noinline int slow_special(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct leg *l, *o = NULL;
	struct plan *p;
	enum step step;

	if (!sc)
		return TCX_NEXT;
	p = &sc->p;
	l = bpf_map_lookup_elem(&legs, &sc->t);
	if (!l)
		return RETRY; /* the flow is over since the look-up */
	/* A retransmitted SYN-ACK goes to the client, like the first one, until the client has completed the handshake. Our
	 * socket would complete it for a client that may not exist. */
	if (sc->end_to_end && (sc->s.flags & (TH_SYN | TH_ACK | TH_RST)) == (TH_SYN | TH_ACK) && !has_client(l)) {
		report_handshake(skb);
		return TCX_DROP;
	}
	/* A SYN begins a new connection if the old one is over, or has no live socket in control mode. A live socket gets the
	 * SYN, and challenges its sender. With LEG_END_TO_END, the leg towards a server has no socket while the connection is
	 * being opened: a SYN must not end that. */
	if ((sc->s.flags & (TH_SYN | TH_ACK | TH_RST)) == TH_SYN &&
	    (l->flags & LEG_RESET || is_over(l) ||
	     (in_control(l) && (!sc->end_to_end || listened(sc)) && !has_live_socket(skb, sc)))) {
		o = l->flags & LEG_PAIRED && !in_control(l) ? bpf_map_lookup_elem(&legs, &sc->other) : NULL;
		if (o && !is_paired(o, &sc->t))
			o = NULL;
		/* During a drain, what this host has sent before its end may still be on its way through the socket and the
		 * process. Until the other host has it, or the process has told it of the reset and closed the socket, the flow
		 * is not over. The SYN comes again. */
		if (o && !is_over(o) && !knows_of_reset(o) && (!(o->flags & LEG_RESET) || other_has_live_socket(skb)))
			return drop(V_SYN);
		return begin_anew(skb, o ? OTHER_GOES : OTHER_NONE);
	}
	/* Until user space has created the socket, the kernel would answer with a reset. */
	if (sc->end_to_end && sc->s.flags & TH_SYN && !has_socket(skb, sc))
		return drop(V_HANDSHAKE_LOST);
	if (sc->s.flags & TH_SYN && !in_control(l))
		return challenge_here(skb, sc, l);
	if (!(sc->s.flags & TH_RST)) {
		p->l.keep = sc->s.len;
		p->l.flags = sc->s.flags;
		bpf_spin_lock(&l->lock);
		edit_for_local(l, &sc->s, p, 1);
		bpf_spin_unlock(&l->lock);
		return untouched(l) ? as_it_came() : emit_local(skb, 0);
	}
	if (l->flags & LEG_PAIRED)
		o = bpf_map_lookup_elem(&legs, &sc->other);
	if (o && !is_paired(o, &sc->t))
		o = NULL;
	step = record_reset(l, o, &sc->s, p);
	if (step == STEP_RECORD)
		return RETRY;
	if (step == STEP_DROP)
		return drop(p->dropped);
	if (step == STEP_ASK) {
		count(V_RST_UNPROVEN);
		if (p->fwd && p->f.flags == TH_ACK && question(skb))
			return drop(V_REWRITE_FAILED);
	} else if (p->events) {
		count(V_RST);
		tell(&sc->t, EVENT_RESET);
	} else if (untouched(l) && p->l.seq == sc->s.seq) {
		return as_it_came();
	}
	if (p->local && (!p->fwd || sc->ttl <= 1))
		return emit_local(skb, 0);
	if (!o)
		return drop(V_NO_PEER);
	if (sc->ttl <= 1)
		return drop(V_TTL);
	next_hop(sc, o);
	return p->local ? emit_both(skb) : emit_forward(skb, 0);
}

/* Let a segment in whose hosts have not completed their handshake. Returns ADMITTED if they have, or what becomes of it. */
static __always_inline int admit_opening(struct __sk_buff *skb, struct scratch *sc, struct leg *l)
{
	if (l->flags & LEG_SYN) {
		struct syn_options opt = {};

		if ((sc->s.flags & (TH_SYN | TH_ACK)) == (TH_SYN | TH_ACK)) {
			parse_syn(skb, &opt);
			bpf_spin_lock(&l->lock);
			own_syn_ack(l, sc, &opt);
			bpf_spin_unlock(&l->lock);
			l->seen = bpf_ktime_get_coarse_ns();
			compare_clocks(l, l->tsval_in, l->seen);
			if (!sc->end_to_end && (classic_ecn(skb) || only_offered(skb, l, &opt)))
				return drop(V_REWRITE_FAILED);
		}
		if (!sc->end_to_end)
			return TCX_NEXT;
		/* A server that has not answered has nothing to say. It may challenge the SYN, without data, or refuse it. */
		if (sc->transparent && (sc->s.flags & TH_RST ? !(sc->s.flags & TH_ACK) || sc->s.ack != l->iss + 1
							     : is_ordinary(sc) && (sc->s.len || sc->s.flags & TH_FIN)))
			return pass_by(skb, sc);
		report_handshake(skb);
		return TCX_DROP;
	}
	/* Nor has one whose client has not answered it, but it may reset that. The answer may be forged, like the SYN. */
	if (sc->transparent && is_opening(l) && (sc->s.flags & TH_RST ? sc->s.seq != irs(l) + 1 : is_ordinary(sc)))
		return pass_by(skb, sc);
	return ADMITTED;
}

/* Find the record of the flow's other leg, and wake up both if they sleep. other: that record, or NULL. Returns ADMITTED, or what
 * becomes of the segment. */
static __always_inline int admit_paired(struct scratch *sc, struct leg *l, struct leg **other)
{
	struct leg *o = NULL;
	int r;

	if (l->flags & LEG_PAIRED) {
		sc->other = l->peer;
		o = bpf_map_lookup_elem(&legs, &sc->other);
		if (o && !is_paired(o, &sc->t))
			o = NULL; /* it has left this flow, or is another connection by now */
		if ((l->flags | (o ? o->flags : 0)) & LEG_SPLICED) {
			r = wake_up(&sc->t, &sc->other);
			if (r != ADMITTED)
				return r;
		}
	}
	*other = o;
	return o && is_half_frozen(l, o) ? RETRY : ADMITTED;
}

/* Take the flow back if the segment carries data beyond its limit. In forwarding mode, both directions go back to control mode.
 * In a drain only this one does: the other may have forwarded bytes that its socket has not seen, and user space waits for it.
 * Returns ADMITTED, or what becomes of the segment. */
static __always_inline int admit_beyond(struct scratch *sc, struct leg *l, struct leg *o)
{
	if (!o || !takes_back(l, &sc->s) || sc->s.flags & (TH_SYN | TH_RST))
		return ADMITTED;
	/* The record was read without its lock: a freeze that has begun since admit_paired() would go on to freeze the other leg
	 * of a direction that was taken back. */
	barrier();
	if (is_half_frozen(l, o))
		return RETRY;
	note_excess(l, &sc->s); /* the socket may not get it now: see lose_marked() */
	if (sc->woken)
		unsplice_legs(&sc->t, &sc->other);
	else
		unsplice_direction(l, o);
	tell_all(&sc->t, 1 << EVENT_TRIGGERED | (sc->woken ? AT_ONCE : 0));
	return ADMITTED;
}

/* Send the copies that record_step() has planned. */
static __always_inline int send_planned(struct __sk_buff *skb, struct scratch *sc, struct leg *l, struct leg *o)
{
	struct plan *p = &sc->p;

	if (p->plain)
		return p->lose_local ? drop(V_CE_DROPPED) : as_it_came();
	if (lose_marked(p)) {
		count(V_CE_DROPPED);
		if (!p->local && !p->fwd)
			return TCX_DROP;
	}
	/* A fragment cannot be cut, not even to a bare acknowledgement. The next segment carries the same one. */
	if (sc->fragment && (!p->local || p->l.keep < sc->s.len))
		return drop(V_FRAGMENT);
	if (!p->fwd || sc->fragment)
		return emit_local(skb, 0);
	if (!o)
		return drop(V_NO_PEER);
	if (sc->ttl <= 1)
		return drop(V_TTL);
	if (l->flags & LEG_TAP && p->fwd_data)
		tap(skb, p->at, TAP_STREAM, p->acked, p->f.keep);
	next_hop(sc, o);
	if (p->local)
		return emit_both(skb);
	count(V_FORWARDED_SLOW);
	return emit_forward(skb, 0);
}

/* A segment from a host, outside of forwarding mode. phase_in decides where its data goes, phase_out where its acknowledgement
 * goes. host_segment() implements this table, and record_step() takes the locks around it. "Below" and "beyond" are relative to
 * the bound.
 *
 *   phase      data below      data beyond            acknowledgement             leaves it when
 *   LOCAL      to the socket   to the socket          to the socket               freeze_in() or freeze_out()
 *   TO_FWD     to the socket   forwarded, or held     to the socket; beyond,      all below is acknowledged: FWD
 *                                                     to the other host, too      stop_drain(), a limit: LOCAL
 *   FWD        forwarded       forwarded              to the other host           committed: LEG_SPLICED; unsplice_in()
 *   TO_LOCAL   forwarded       to the socket          below, to the other host;   all below is acknowledged: LOCAL
 *                                                     beyond, to the socket
 *
 * An RST in order ends both legs in any phase; in control mode the socket handles it (record_reset()), and in a switch, too, if
 * it may hold data that came before (host_reset()). A SYN goes to the socket
 * in control mode, and is challenged in any other phase. A FIN is treated as data. */
__noinline int slow_ingress(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct leg *l, *o = NULL;
	struct plan *p;
	enum step step;
	int r;

	if (!sc)
		return TCX_NEXT;
	p = &sc->p;
	l = bpf_map_lookup_elem(&legs, &sc->t);
	/* A path entry without a record: the flow was released, and is being recreated. Drop the packet, or the kernel would
	 * reset the connection for want of a socket. If the entry is gone as well, the flow is over: this may begin the next one. */
	if (!l)
		return find_path(&sc->t) ? drop(V_NO_RECORD) : RETRY;

	/* admit */
	sc->woken = 0;
	sc->transparent = !!(l->flags & LEG_TRANSPARENT);
	sc->end_to_end = !!(l->flags & LEG_END_TO_END);
	r = admit_opening(skb, sc, l);
	if (r != ADMITTED)
		return r;
	parse_options(skb);
	if (!tcp_sum_right(skb)) /* as_it_came(): the stack counts the error */
		return untouched(l) ? as_it_came() : drop(V_BAD_CHECKSUM);
	r = admit_paired(sc, l, &o);
	if (r != ADMITTED)
		return r;
	note_unheard(l, &sc->s, bpf_ktime_get_coarse_ns());
	sc->s.socket_known = 0;
	if (may_be_behind(l) || sc->s.flags & TH_RST)
		ask_socket(skb);
	r = admit_beyond(sc, l, o);
	if (r != ADMITTED)
		return r;
	if (!refuses(l, &sc->s))
		heard(l, &sc->s, bpf_ktime_get_coarse_ns());

	if (sc->s.flags & (TH_SYN | TH_RST))
		return slow_special(skb);
	if (sc->transparent && (in_control(l) || l->flags & LEG_RESET) && !refuses(l, &sc->s))
		report_deserted(skb);

	if (waits(l, sc)) {
		p->hold = HOLD;
		p->held_from = 0;
		if (hold(skb))
			return TCX_DROP;
		p->hold = 0; /* no room: it need not wait, and its host would retransmit it only after a timeout */
		wait_no_more(l);
	}

	/* Check the size before the segment changes any state: if it cannot be forwarded, it must not count as received. */
	if (o && to_be_forwarded(l, &sc->s)) {
		note_excess(l, &sc->s); /* it may be cut off here */
		r = make_fit(skb, mtu_towards(skb, sc, o));
		if (r)
			return r;
	}

	/* plan */
	step = record_step(l, o, &sc->t, &sc->other, &sc->s, p);
	if (step == STEP_RECORD)
		return RETRY;
	if (p->hold)
		hold(skb);
	/* Go back at once, so that the remaining acknowledgements announce the window of the local socket. */
	if (p->events & 1 << EVENT_LIMIT_REACHED && sc->woken)
		unsplice_legs(&sc->t, &sc->other);
	if (p->events) /* parked sockets and held segments wait for user space */
		tell_all(&sc->t, p->events | (sc->woken || (o && (l->flags | o->flags) & LEG_HOLD) ? AT_ONCE : 0));
	if (step == STEP_DROP)
		return p->dropped ? drop(p->dropped) : TCX_DROP;
	return send_planned(skb, sc, l, o);
}

/* ---- fast path: forwarding mode ---- */

/* Answer a SYN on a live flow, or a late reset (is_late()), with a challenge ACK (RFC 5961, 4.2). Only the other host knows the
 * numbers for one. So the packet becomes a keep-alive to that host, just below its window, and its answer is forwarded to the
 * sender. */
static __always_inline int challenge(struct __sk_buff *skb, struct scratch *sc, const struct path *p,
				     const struct path *rev)
{
	__u32 via = path_via(p);
	struct via *v = bpf_map_lookup_elem(&vias, &via);

	if (!v || sc->ttl <= 1 || !may_answer(&sc->t, ANSWER_CHALLENGE))
		return drop(V_CHALLENGE_LIMITED);
	path_ask(p, rev, bpf_map_lookup_elem(&legs, &sc->t), bpf_map_lookup_elem(&legs, &sc->other), bpf_ktime_get_ns(), &sc->p.f);
	if (question(skb))
		return drop(V_REWRITE_FAILED);
	sc->ifindex = v->ifindex;
	__builtin_memcpy(sc->hop, v->dmac, 12);
	count(V_CHALLENGE);
	return emit_forward(skb, 0);
}

/* Answer a segment of a connection that was reset: the packet becomes an RST to its sender. */
static __always_inline int reset_again(struct __sk_buff *skb, struct scratch *sc)
{
	int refused = path_reset_again(&sc->s, &sc->p.f);

	return refused ? drop(refused) : answer(skb, V_RESET_AGAIN);
}

/* A SYN on a spliced flow. */
static __always_inline int fast_syn(struct __sk_buff *skb, struct scratch *sc, const struct path *p, const struct path *rev,
				    union path_word w)
{
	if (w.flags & rev->word.flags & PATH_FIN_ACKED && !(sc->s.flags & (TH_ACK | TH_RST)))
		return begin_anew(skb, OTHER_GOES);
	count(V_SYN);
	return challenge(skb, sc, p, rev);
}

/* A segment in forwarding mode, the general way. remote6: the outgoing leg's host, if the entry is IPv6. */
static __always_inline int fast_ingress(struct __sk_buff *skb, struct scratch *sc, struct path *p, const __u32 *remote6)
{
	union path_word w = { .all = *(volatile __u64 *)&p->word.all };
	__u32 via = path_index(p), rst = sc->s.flags & TH_RST, refused, gap;
	struct via *v = bpf_map_lookup_elem(&vias, &via);
	struct leg *l = NULL;
	struct path *rev;
	enum step step;
	int r;

	if (!v)
		return drop(V_NO_HOP);
	if (w.flags & PATH_DEAD) {
		if ((sc->s.flags & (TH_SYN | TH_ACK | TH_RST)) == TH_SYN) {
			rev = lead_out(sc, p, remote6, v) ? find_path(&sc->other) : NULL;
			return begin_anew(skb, !rev || !leads_back(sc, rev) ? OTHER_NONE :
					       is_mirrored(sc)		    ? OTHER_GOES :
									      OTHER_IS_RESET);
		}
		if (!(sc->s.flags & TH_RST))
			return reset_again(skb, sc);
	}
	if (!lead_out(sc, p, remote6, v))
		return drop(V_NO_HOP);
	rev = find_path(&sc->other);
	if (!rev || !leads_back(sc, rev)) /* gone, or another connection by now */
		return drop(V_NO_PEER);
	refused = sc->s.flags & (TH_SYN | TH_RST) ? 0 : path_refuses(p, w, rev, &sc->s); /* SYN and RST have their own rules */
	if (refused)
		return drop(refused);
	if (!tcp_sum_right(skb))
		return drop(V_BAD_CHECKSUM);
	gap = path_leaves_gap(w, &sc->s);
	if (w.flags & PATH_TRIGGER || rst || gap)
		l = bpf_map_lookup_elem(&legs, &sc->t);
	if (gap) {
		parse_options(skb);
		if (path_is_from_earlier(l, &sc->s, bpf_ktime_get_coarse_ns()))
			return drop(V_OLD_TIMESTAMP);
	}
	if ((!(sc->s.flags & (TH_SYN | TH_RST)) && path_is_beyond(w, l, &sc->s)) || path_reset_waits(rev, w, l, &sc->s)) {
		stop_path(p);
		return RETRY;
	}
	if (sc->ttl <= 1)
		return drop(V_TTL);
	r = make_fit(skb, v->mtu);
	if (r)
		return r;
	if (sc->s.flags & TH_SYN)
		return fast_syn(skb, sc, p, rev, w);
	parse_options(skb);
	step = step_on_path(p, rev, w.all, 1);
	if (sc->p.events)
		tell_all(&sc->t, sc->p.events);
	if (step == STEP_RECORD)
		return RETRY; /* an unsplice has stopped the path meanwhile */
	if (step == STEP_DROP)
		return drop(sc->p.dropped);
	if (rst)
		count(sc->p.events ? V_RST : V_RST_UNPROVEN);
	if (step == STEP_ASK)
		return challenge(skb, sc, p, rev);
	if (p->via & VIA_TAP && sc->s.len && !rst)
		tap_path(skb, sc, p, rev, w);
	if (rewrite_tcp(skb, 1, ports_of(&sc->other)) || rewrite_ip(skb, 1, sc->ttl - 1))
		return drop(V_REWRITE_FAILED);
	if (bpf_skb_store_bytes(skb, 0, v->dmac, 12, 0) || trim_padding(skb, sc))
		return drop(V_REWRITE_FAILED);
	count(V_FORWARDED);
	return leave_by(v);
}

/* A first fragment outside of forwarding mode, or a segment behind an extension header. It marks its leg with LEG_FRAGMENTS,
 * since max_in can no longer be trusted. Data for the socket goes there. Later fragments need no program: a shim changes the
 * TCP header only. */
static __always_inline int fragment(struct __sk_buff *skb, struct scratch *sc, const struct path *p, int parsed)
{
	struct leg *l;

	if (p->word.flags & PATH_SPLICED)
		return drop(parsed == PARSED_TINY ? V_FRAGMENT_TINY : V_FRAGMENT);
	l = bpf_map_lookup_elem(&legs, &sc->t);
	if (!l)
		return drop(V_NO_PEER); /* as in slow_ingress() */
	sc->transparent = !!(l->flags & LEG_TRANSPARENT);
	if (parsed == PARSED_TINY) /* what it brings is unknown, and no honest sender splits a TCP header (RFC 1858, 3.2) */
		return drop(V_FRAGMENT_TINY);
	if (parsed != PARSED_EXTENSION)
		forget_train(sc);
	if (!refuses(l, &sc->s))
		__sync_fetch_and_or(&l->flags, LEG_FRAGMENTS);
	if (untouched(l))
		return TCX_NEXT;
	if (l->flags & LEG_SPLICED || sc->s.flags & (TH_SYN | TH_RST))
		return drop(V_FRAGMENT);
	if (l->phase_in != PHASE_LOCAL && (l->phase_in != PHASE_TO_LOCAL || before(sc->s.seq, l->bound_in)))
		return drop(V_FRAGMENT);
	return SLOW;
}

/* The first fragment of a flow that has a limit: take the flow back to control mode instead of forwarding fragments. */
static __always_inline int fragment_of_limited(struct __sk_buff *skb, struct scratch *sc)
{
	struct leg *l = bpf_map_lookup_elem(&legs, &sc->t);
	struct path *p;

	if (!l || !(l->flags & LEG_PAIRED))
		return drop(V_NO_PEER);
	sc->other = l->peer;
	unsplice_legs(&sc->t, &sc->other);
	tell(&sc->t, EVENT_TRIGGERED);
	p = find_path(&sc->t);
	return p ? fragment(skb, sc, p, PARSED_FRAGMENT) : drop(V_NO_PEER);
}

/* Look up the path entry, and choose between fast and slow. */
__noinline int dispatch(struct __sk_buff *skb, int parsed)
{
	struct scratch *sc = scratch();
	struct path *p;

	if (!sc)
		return TCX_NEXT;
	sc->transparent = sc->end_to_end = 0; /* another try may find another connection, or none */
	if (is_list(skb) && !make_one(skb))
		return drop(V_REWRITE_FAILED);
	if (!sc->v6) {
		struct tuple4 k = key4(&sc->t);
		struct path4 *p4 = find4(&k);

		p = p4 ? &p4->p : NULL;
		sc->traced = p && p->word.flags & PATH_TRACE;
		if (p4 && parsed == PARSED_TCP && (p4->p.word.flags & PATH_SPLICED))
			return fast_ingress(skb, sc, &p4->p, NULL);
	} else {
		struct path6 *p6 = find6(&sc->t);

		p = p6 ? &p6->p : NULL;
		sc->traced = p && p->word.flags & PATH_TRACE;
		if (p6 && parsed == PARSED_TCP && (p6->p.word.flags & PATH_SPLICED))
			return fast_ingress(skb, sc, &p6->p, p6->remote);
	}
	if (!p) {
		return UNKNOWN;
	} else if (parsed == PARSED_FRAGMENT && (p->word.flags & PATH_SPLICED)) {
		if ((p->word.flags & (PATH_TRIGGER | PATH_FRAGMENTS)) != PATH_TRIGGER)
			return FIRST;
		return fragment_of_limited(skb, sc);
	} else if (parsed != PARSED_TCP) {
		return fragment(skb, sc, p, parsed);
	}
	return SLOW;
}

/* Call the functions with large stack frames one after the other, so that they do not nest: the deepest chain of calls is limited
 * to 512 bytes, and older kernels round each frame up to 32 (tests/tests/object.rs). */
static __always_inline int decide(struct __sk_buff *skb, int parsed)
{
	int r = dispatch(skb, parsed);

	if (r == UNKNOWN && parsed != PARSED_TCP)
		return before_leg(parsed);
	if (r == UNKNOWN) {
		r = track_ingress(skb);
		if (r != 1)
			return r ? TCX_DROP : TCX_NEXT;
		r = SLOW;
	}
	if (r == FIRST)
		return first_fragment(skb);
	return r == SLOW ? slow_ingress(skb) : r;
}

#define VLAN_ID 0xfff /* of a tag (802.1Q, 9.6) */

SEC("tcx/ingress")
int ingress(struct __sk_buff *skb)
{
	struct scratch *sc;
	int r, parsed, again, taken;

	if (skb->tc_index == INDEX_PASSES) /* it has passed a data path in another network namespace */
		skb->tc_index = 0;
	if (skb->pkt_type != PACKET_HOST) /* broadcast, multicast, or for another machine: TCP ignores these */
		return TCX_NEXT;
	if (skb->vlan_present) {
		if (skb->vlan_tci & VLAN_ID) /* the VLAN device will show it to us again, without its tag */
			return TCX_NEXT;
		if (bpf_skb_vlan_pop(skb)) /* a tag with ID 0 carries a priority only (802.1Q, 6.9.1) */
			return drop(V_REWRITE_FAILED);
	}
	if (skb->mark == MARK_LOCAL) {
		skb->mark = 0;
		return TCX_NEXT;
	}
	if (skb->mark == MARK_TRANSPARENT || skb->mark == MARK_PLAIN)
		return TCX_NEXT;
	again = skb->mark == MARK_HELD;
	taken = skb->mark == MARK_TAKEN;
	if (again || taken)
		skb->mark = 0; /* or egress() would send it back again */
	if (is_worth_prefetching())
		prefetch(skb);
	if (skb->protocol == bpf_htons(ETH_P_IP))
		r = fast4(skb);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		r = fast6(skb);
	else
		return TCX_NEXT;
	if (r == PASSES && !taken) {
		if (!skb->tc_index) /* somebody else's stays */
			skb->tc_index = INDEX_PASSES;
		return TCX_NEXT;
	}
	if (r != UNUSUAL && r != PASSES)
		return r;
	sc = scratch();
	if (!sc)
		return TCX_NEXT;
	parsed = parse(skb, sc, 0);
	sc->s.again = again;
	sc->taken = taken;
	if (parsed == PARSED_LATER)
		return later_fragment(skb);
	if (parsed == PARSED_OTHER)
		return translate_error(skb);
	/* Retry twice: the path may have been stopped, and then committed again. */
	r = decide(skb, parsed);
	if (r == RETRY)
		r = decide(skb, parsed);
	if (r == RETRY)
		r = decide(skb, parsed);
	if (r == TCX_NEXT && (sc->transparent || taken))
		skb->mark = MARK_TRANSPARENT;
	if (r == RETRY)
		r = drop(V_STALE_CPU);
	return sc->traced ? trace(skb, r) : r;
}

/* ---- from a local socket ---- */

/* Does user space pass the segment on from one host of a handshake to the other? It sends those through a raw socket, which
 * the kernel's own segments never come from: theirs have a TCP socket, or that of its resets, whose protocol is TCP as well. */
static __always_inline int is_passed_on(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	sk = sk ? bpf_sk_fullsock(sk) : NULL;
	return sk && sk->protocol == IPPROTO_RAW;
}

/* Is the segment from the socket of an earlier connection with the same addresses, which is about to be closed? While two hosts
 * shake hands, user space passes on all that they say, and the socket that it makes has nothing to say yet. It may be closed,
 * however, once the server has answered; is_of_earlier() tells its RST from others. The numbers of an earlier connection must
 * not get into the record: the server would hear acknowledgements of what it has not sent, and would ignore all segments. */
static __always_inline int is_stray(struct __sk_buff *skb, const struct leg *l, const struct seg *s)
{
	if (!(l->flags & LEG_END_TO_END) || is_passed_on(skb))
		return 0;
	return l->flags & LEG_SYN || (!(s->flags & TH_RST) && is_opening(l));
}

__noinline int slow_egress(struct __sk_buff *skb)
{
	struct scratch *sc = scratch();
	struct leg *l, *o = NULL;
	struct plan *p;

	if (!sc)
		return TCX_NEXT;
	p = &sc->p;
	l = bpf_map_lookup_elem(&legs, &sc->t);
	if (!l)
		return TCX_NEXT;
	if (sc->fragment) /* fragmented on output: the segment ends beyond this packet */
		__sync_fetch_and_or(&l->flags, LEG_FRAGMENTS);
	if (sc->s.flags & TH_SYN) {
		if (l->flags & LEG_SYN) {
			if (own_syn(skb, l))
				return drop(V_REWRITE_FAILED);
			l->ifindex = skb->ifindex;
			l->mark = skb->mark;
			bpf_skb_load_bytes(skb, 0, l->dmac, 6);
			bpf_skb_load_bytes(skb, 6, l->smac, 6);
		}
		return TCX_NEXT;
	}
	if (is_stray(skb, l, &sc->s))
		return drop(V_LOCAL_MUTED);
	/* An RST while our SYN is unanswered: the host has answered the SYN with the numbers of an earlier connection of this
	 * port. The socket resets that one and sends its SYN again (RFC 9293, 3.10.7.3). This connection goes on. The other host of a
	 * handshake does the same, and its RST may be late: the answer to its SYN may have come already, unheard by user space. */
	if (l->flags & LEG_SYN || (sc->s.flags & TH_RST && is_passed_on(skb)))
		return TCX_NEXT;
	parse_options(skb);
	if (l->flags & LEG_PAIRED && is_switching(l)) {
		o = bpf_map_lookup_elem(&legs, &l->peer);
		if (!o && l->phase_in == PHASE_TO_FWD)
			return drop(V_NO_PEER);
	}
	if (!record_egress(l, o, &sc->t, &sc->s, p))
		return drop(V_LOCAL_MUTED);
	l->ifindex = skb->ifindex;
	l->mark = skb->mark;
	bpf_skb_load_bytes(skb, 0, l->dmac, 6);
	bpf_skb_load_bytes(skb, 6, l->smac, 6);
	count(V_LOCAL_OUT);
	if (p->l.seq == sc->s.seq && p->l.ack == sc->s.ack && p->l.keep == sc->s.len && p->l.win == sc->s.win &&
	    p->l.flags == sc->s.flags && (!sc->s.has_ts || p->l.tsval == sc->s.tsval))
		return TCX_NEXT;
	if (rewrite_tcp(skb, 0, 0) || trim(skb, p->l.keep, 0))
		return drop(V_REWRITE_FAILED);
	return TCX_NEXT;
}

static __always_inline int from_socket(struct __sk_buff *skb)
{
	struct scratch *sc;
	struct path *p;
	int r;

	if (skb->mark == MARK_HELD)
		return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
	if (skb->vlan_present || skb->ingress_ifindex) /* seen on the VLAN device already, or forwarded, by us or by the kernel */
		return TCX_NEXT;
	sc = scratch();
	if (!sc || parse(skb, sc, 1) >= PARSED_TINY)
		return TCX_NEXT;
	p = find_path(&sc->t);
	if (!p) {
		if ((sc->s.flags & (TH_SYN | TH_ACK)) == (TH_SYN | TH_ACK))
			track_egress(skb);
		else if (sc->s.flags & TH_RST && is_shaking_hands(sc))
			return drop(V_LOCAL_MUTED);
		return TCX_NEXT;
	}
	sc->traced = !!(p->word.flags & PATH_TRACE);
	if (p->word.flags & PATH_SPLICED) {
		if ((p->word.flags & PATH_DEAD) && (sc->s.flags & TH_RST))
			return TCX_NEXT;
		if (!bpf_map_lookup_elem(&legs, &sc->t))
			return drop(V_LOCAL_MUTED); /* released: the last segments of a closed socket */
		slow_egress(skb); /* muted, but its acknowledgement and window are recorded */
		r = TCX_DROP;
	} else {
		r = slow_egress(skb);
	}
	return sc->traced ? trace(skb, r) : r;
}

SEC("tcx/egress")
int egress(struct __sk_buff *skb)
{
	int r = from_socket(skb);

	/* A socket takes NET_XMIT_DROP, which TCX_DROP becomes, for congestion, and would be slow after the return of its flow
	 * (tcp_enter_cwr()). A packet redirected to no device is dropped as well, but counts as sent. */
	return r == TCX_DROP ? bpf_redirect(0, 0) : r;
}
