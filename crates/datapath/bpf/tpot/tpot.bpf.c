// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Translucent proxying: the option of SYNs and SYN-ACKs, and the tunnels between asker and taker (tpot.h).
 *
 * These programs see packets before `ingress` and after `egress` of splice.bpf.c. So the data path, sockets included, has to do
 * with inner packets only, whatever it does with a connection: copy, splice, unsplice.
 */
#include <linux/if_packet.h>
#include "tpot_auth.h"
#include "tpot_ends.h"
#include "tpot_tunnel.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* SYNs of a connection that carry the option. Something on the path may drop segments with it (TP 2.4). */
#define ASK_TIMES 2
#define AF_INET 2 /* <sys/socket.h> */
#define LEFT_ALONE 1 /* of a SYN that is not intercepted; none of TCX_NEXT and the like */

/* ---- packets that arrive ---- */

/* Give a packet for an address that is not ours to our socket: `ingress` of splice.bpf.c, which sees it next, leaves the mark
 * that the routing rule knows. */
static __always_inline int deliver(struct __sk_buff *skb)
{
	barrier_var(skb); /* the verifier refuses a pointer to the field, which the compiler would keep for its many uses */
	skb->mark = MARK_TAKEN;
	return TCX_NEXT;
}

/* Give the packet to the listening socket of a rule. Returns 0 if there is one. ctx: of a packet, or of the kernel's search for
 * a socket. */
static __always_inline int assign(void *ctx, __u32 rule, __u64 flags)
{
	struct bpf_sock *sk = bpf_map_lookup_elem(&tpot_listeners, &rule);
	int r;

	if (!sk)
		return -1;
	r = bpf_sk_assign(ctx, sk, flags);
	bpf_sk_release(sk);
	return r;
}

/* Tell user space of an asker's SYN, whose TCP header has `len` bytes from `at`, or, with 0, that the asker does without us.
 * Returns 0 if the ring is full. */
__noinline int report(struct __sk_buff *skb, const struct tuple *t, __u32 at, __u32 len)
{
	struct tpot_syn *syn = t ? bpf_map_lookup_elem(&tpot_syns, t) : NULL;
	struct tpot_asking *a;

	if (!syn || !t)
		return 0;
	a = bpf_ringbuf_reserve(&askings, sizeof(*a), 0);
	if (!a) {
		count(T_UNREPORTED);
		return 0;
	}
	a->segment.leg = *t;
	a->segment.ifindex = skb->ifindex;
	a->isn = syn->seq;
	a->hops = syn->hops;
	a->listener = syn->listener;
	a->over = !len;
	if (len) {
		len = ((len - 1) & 63) + 1; /* see find_options() */
		if (len > sizeof(a->segment.tcp) || bpf_skb_load_bytes(skb, 0, a->segment.eth, sizeof(a->segment.eth)) ||
		    bpf_skb_load_bytes(skb, L3, a->segment.ip, sizeof(a->segment.ip)) ||
		    bpf_skb_load_bytes(skb, at, a->segment.tcp, len)) {
			bpf_ringbuf_discard(a, 0);
			return 0;
		}
	}
	bpf_ringbuf_submit(a, 0);
	return 1;
}

/* A packet of the asker that is in no tunnel. Of a connection that is over, or an RST that is about another answer to the SYN, it
 * is for the server: the route past us leads there. An RST that had a socket, which is gone, has ended it. */
static __always_inline int is_for_server(struct __sk_buff *skb, struct tpot_tunnel *tn, const struct packet *p)
{
	int state;

	if ((p->flags & (TH_RST | TH_ACK)) == (TH_RST | TH_ACK) && (!p->seq || !(tn->flags & TPOT_OUTSIDE)))
		return 1;
	if (p->flags & TH_SYN || !is_over(tn))
		return 0;
	state = has_socket(skb, p);
	return is_proven_over(tn, state) || (tn->flags & TPOT_RST && !state);
}

/* Challenge a host that does not ask any more, outside of the tunnel, where it answers. Its own SYN, sent again without the
 * option, says nothing of that: the answer was under way. */
static __always_inline int challenge(struct __sk_buff *skb, struct tpot_tunnel *tn, const struct packet *p)
{
	if (p->seq != tn->isn)
		__sync_fetch_and_or(&tn->flags, TPOT_OUTSIDE);
	return answer_back(skb, NULL, p, tn, T_CHALLENGED);
}

/* When is the server of an intercepted connection connected to? */
static __always_inline __u32 handshake_of(__u32 rule)
{
	struct tpot_rule *r = bpf_map_lookup_elem(&tpot_rules, &rule);

	return r ? r->handshake : TPOT_BASIC;
}

/* A packet that is in no tunnel, and may be one of two hosts that have nothing to do with us. Our half-open connection with their
 * addresses, which a forged SYN has made, must not get it. */
static __always_inline int pass_by(struct __sk_buff *skb, const struct packet *p)
{
	__u32 *at = pending(&p->t);
	struct tpot_syn *syn;

	if (!at || seconds() - *at > TPOT_PENDING_FOR)
		return TCX_NEXT;
	syn = bpf_map_lookup_elem(&tpot_syns, &p->t);
	if (syn && syn->role == TPOT_PLAIN && !(p->flags & (TH_SYN | TH_RST)) &&
	    (syn->given > 1 || (syn->answered && p->ack == syn->iss + 1))) { /* the client has got our SYN-ACK */
		if (syn->given < 2)
			syn->given = 2;
		return deliver(skb);
	}
	if (socket_state(skb, &p->t, p->v6) != BPF_TCP_NEW_SYN_RECV ||
	    bpf_map_lookup_elem(&tpot_addresses, p->t.local)) /* of another listener, with our address */
		return TCX_NEXT;
	if (set_aside(skb))
		return drop(T_FAILED);
	count(T_PASSED_BY);
	return TCX_NEXT;
}

/* Does a SYN ask for a proxy? */
static __always_inline int asks(struct __sk_buff *skb, const struct packet *p)
{
	struct options *o = read_options(skb, p);

	return o && o->size == sizeof(struct tpot_option);
}

/* A SYN on its way back from user space. If it was held here, it goes to the listener now. */
static __always_inline int admit(struct __sk_buff *skb, const struct packet *p)
{
	struct tpot_syn *syn = bpf_map_lookup_elem(&tpot_syns, &p->t);

	if (!syn || syn->role == TPOT_ASKER)
		return TCX_NEXT;
	if (syn->seq != p->seq) /* the asker has begun another connection */
		return drop(T_UNSERVED);
	if (syn->role == TPOT_TAKER && socket_state(skb, &p->t, p->v6) != BPF_TCP_TIME_WAIT && assign(skb, syn->listener, 0))
		return drop(T_UNSERVED);
	expect_socket(&p->t);
	syn->given = 1;
	count(T_ADMITTED);
	return deliver(skb);
}

/* A SYN with the option. */
static __always_inline int intercept(struct __sk_buff *skb, struct packet *p, struct options *o)
{
	struct tuple dest = p->t;
	struct tpot_config *c = configured();
	struct tpot_syn syn = {}, *known;
	struct tpot_own *own;
	__u32 key = skb->ifindex, rule, handshake;
	int state;

	__builtin_memcpy(dest.remote, p->t.local, 16); /* rules are about the destination */
	dest.rport = p->t.lport;
	rule = rule_for(TPOT_RULE_TAKE, &dest);
	if (!rule || !o->hops || bpf_map_lookup_elem(&tpot_addresses, p->t.local) ||
	    bpf_map_lookup_elem(&tpot_addresses, p->t.remote)) { /* our own SYN, in a loop */
		if (!is_awaited(&p->t) && !rule_for(TPOT_RULE_PLAIN, &dest))
			count(T_LEFT);
		return LEFT_ALONE;
	}
	own = bpf_map_lookup_elem(&tpot_own, &key);
	if (!own || !(p->v6 ? own->v6[0] : own->v4[3])) {
		count(T_UNSERVED);
		return LEFT_ALONE;
	}
	syn.seq = p->seq;
	syn.role = TPOT_TAKER;
	syn.hops = o->hops;
	syn.udp = c && c->udp ? o->capabilities & (TPOT_CAN_UDP | TPOT_WANT_UDP) : 0;
	__builtin_memcpy(syn.peer, p->t.remote, 16);
	__builtin_memcpy(syn.own, p->v6 ? own->v6 : own->v4, 16);
	known = bpf_map_lookup_elem(&tpot_syns, &p->t);
	/* Another SYN does not end a handshake, since it may be forged. The half-open connection challenges its sender. */
	state = socket_state(skb, &p->t, p->v6);
	if (known && known->seq != p->seq && known->role == TPOT_TAKER && state && state != BPF_TCP_TIME_WAIT)
		return deliver(skb);
	handshake = handshake_of(rule - 1);
	if (known && known->seq == p->seq && known->role == TPOT_TAKER) { /* sent again */
		/* Our listener has got it, and has not answered: a rule of this machine's firewall drops it, or its queue is full. */
		if (known->given && !known->answered) {
			if (handshake != TPOT_BASIC)
				report(skb, &p->t, 0, 0);
			count(T_UNANSWERED);
			return LEFT_ALONE;
		}
		syn.iss = known->iss;
		syn.answered = known->answered;
		syn.given = known->given;
	}
	syn.listener = rule - 1;
	if (syn.answered) /* user space knows it */
		handshake = TPOT_BASIC;
	if (handshake != TPOT_CONFIRM)
		syn.given = 1;
	/* A socket in TIME-WAIT decides whether the SYN begins a new connection (RFC 6191), and tpot_lookup() finds our listener
	 * then. With the SYN assigned to the listener, the kernel would drop it, because the addresses are in use. */
	if (bpf_map_update_elem(&tpot_syns, &p->t, &syn, BPF_ANY) ||
	    (state != BPF_TCP_TIME_WAIT && assign(skb, rule - 1, 0))) {
		count(T_UNSERVED);
		return LEFT_ALONE;
	}
	if (shrink_mss(skb, p, o))
		return drop(T_FAILED);
	expect_socket(&p->t);
	count(T_INTERCEPTED);
	if (handshake != TPOT_BASIC) {
		int heard = report(skb, &p->t, p->l4, p->doff);

		if (handshake == TPOT_CONFIRM)
			return heard ? drop(T_HELD) : TCX_DROP; /* the asker sends it again */
	}
	return deliver(skb);
}

static __always_inline int has_listener(__u32 rule)
{
	struct bpf_sock *sk = bpf_map_lookup_elem(&tpot_listeners, &rule);

	if (sk)
		bpf_sk_release(sk);
	return !!sk;
}

/* A SYN of a host that need not ask. tpot_lookup() finds the listener for it, and for a SYN cookie, unless the kernel finds one
 * by its address, where the connection is awaited. There is no tunnel: once the client has completed the handshake, the leg in
 * the data path tells that its packets are for us. Until then, only what fits the handshake is, see pass_by(): anybody can forge
 * a SYN, and its connection may be one that is routed past us. */
static __always_inline int intercept_plain(struct __sk_buff *skb, const struct packet *p)
{
	struct tpot_syn syn = { .seq = p->seq, .role = TPOT_PLAIN }, *known = bpf_map_lookup_elem(&tpot_syns, &p->t);
	struct tpot_config *c = configured();
	struct tuple other = {};
	__u32 rule, handshake;
	int state, live, again;

	__builtin_memcpy(other.remote, p->t.local, 16); /* rules are about the destination */
	other.rport = p->t.lport;
	rule = is_awaited(&p->t) ? TPOT_DOOR + 1 : rule_for(TPOT_RULE_PLAIN, &other);
	if (known && known->role != TPOT_PLAIN && known->seq == p->seq) /* it does not ask any more */
		return LEFT_ALONE;
	if (!c || (!rule && !(known && known->role == TPOT_PLAIN)))
		return LEFT_ALONE;
	__builtin_memcpy(other.local, p->t.remote, 16);
	other.lport = p->t.rport;
	if (bpf_map_lookup_elem(&tpot_addresses, p->t.local) || bpf_map_lookup_elem(&tpot_addresses, p->t.remote) ||
	    socket_state(skb, &other, p->v6)) { /* our own SYN, in a loop: with our address, or with a client's */
		count(T_LEFT);
		return LEFT_ALONE;
	}
	state = socket_state(skb, &p->t, p->v6);
	live = state && state != BPF_TCP_TIME_WAIT;
	again = known && known->seq == p->seq;
	if (live && (!again || !rule))
		return deliver(skb); /* the socket challenges its sender, or repeats its answer */
	if (!rule || (rule != TPOT_DOOR + 1 && !has_listener(rule - 1))) {
		if (rule)
			count(T_UNSERVED);
		bpf_map_delete_elem(&tpot_syns, &p->t);
		return LEFT_ALONE;
	}
	handshake = handshake_of(rule - 1);
	if (again) {
		if (known->given && !known->answered) { /* as in intercept() */
			if (handshake != TPOT_BASIC)
				report(skb, &p->t, 0, 0);
			count(T_UNANSWERED);
			return LEFT_ALONE;
		}
		syn.iss = known->iss;
		syn.answered = known->answered;
		syn.given = known->given;
	}
	syn.hops = c->hops ? c->hops + 1 : 0;
	syn.listener = rule - 1;
	if (syn.answered) /* user space knows it */
		handshake = TPOT_BASIC;
	if (handshake != TPOT_CONFIRM && !syn.given)
		syn.given = 1;
	if (bpf_map_update_elem(&tpot_syns, &p->t, &syn, BPF_ANY)) {
		count(T_UNSERVED);
		return LEFT_ALONE;
	}
	expect_socket(&p->t);
	count(T_INTERCEPTED_PLAIN);
	if (handshake != TPOT_BASIC) {
		int heard = report(skb, &p->t, p->l4, p->doff);

		if (handshake == TPOT_CONFIRM)
			return heard ? drop(T_HELD) : TCX_DROP; /* the client sends it again */
	}
	return deliver(skb);
}

/* Note the server's own answer to a SYN of this host. Returns 0 if it is none. */
static __always_inline int note_answer(const struct packet *p)
{
	struct tpot_syn *syn = bpf_map_lookup_elem(&tpot_syns, &p->t);

	if (!syn || syn->role != TPOT_ASKER || !(p->flags & TH_ACK) || p->ack != syn->seq + 1)
		return 0;
	syn->iss = p->seq;
	syn->answered = 1;
	return 1;
}

/* Has the socket taken the proxy's answer to its SYN? The server's may have come at the same time: what is sent again leaves a
 * second after it was lost, at both ends. What the socket sends first acknowledges the one that it has taken, and perhaps some
 * data: the other one's number is far from that. */
static __always_inline int was_chosen(struct tpot_tunnel *tn, const struct packet *p)
{
	struct tpot_syn *syn = bpf_map_lookup_elem(&tpot_syns, &p->t);

	if (syn && syn->role == TPOT_ASKER && syn->answered && p->ack - (syn->iss + 1) < p->ack - tn->ack)
		return 0;
	__sync_fetch_and_or(&tn->flags, TPOT_CHOSEN);
	return 1;
}

static __always_inline struct tpot_tunnel *fresh(void)
{
	__u32 zero = 0;
	struct tpot_tunnel *tn = bpf_map_lookup_elem(&tpot_fresh, &zero);

	if (tn)
		__builtin_memset(tn, 0, sizeof(*tn));
	return tn;
}

/* A connection enters its tunnel. tn: what is special about it. */
static __always_inline int open_tunnel(struct __sk_buff *skb, const struct tuple *t, const __u32 *peer, const __u32 *own,
				       struct tpot_tunnel *tn)
{
	struct tpot_tunnel *known;
	int r;

	tn->ifindex = skb->ifindex;
	tn->seen = now();
	__builtin_memcpy(tn->peer, peer, 16);
	__builtin_memcpy(tn->own, own, 16);
	r = bpf_map_update_elem(&tpot_tunnels, t, tn, BPF_NOEXIST);
	if (r == -EEXIST) { /* opened by another processor, perhaps for another proxy */
		known = bpf_map_lookup_elem(&tpot_tunnels, t);
		return known && same(known->peer, peer) && same(known->own, own) ? 0 : -1;
	}
	if (r)
		return -1;
	if (tn->role == TPOT_TAKER) /* the asker's counts SYNs: it sends another one if its stack drops the answer */
		bpf_map_delete_elem(&tpot_syns, t);
	count(T_OPENED);
	if (tn->flags & TPOT_UDP)
		count(T_OPENED_UDP);
	return 0;
}

/* A tunnelled packet. Decapsulated is only what belongs to a known connection and comes from the other end of its tunnel;
 * anything else is for the stack, which may have tunnels of its own. No inner SYN ever is, so that nobody can open connections
 * in another's name. */
static __always_inline int from_tunnel(struct __sk_buff *skb, struct packet *outer)
{
	struct packet in = {};
	struct tpot_tunnel *tn;
	struct tpot_syn *syn;
	struct tpot_tunnel *like = fresh();
	int r, answers, taken = 0, cookie = 0, udp = outer->proto == IPPROTO_UDP;
	__u32 listener = 0;

	if (!like)
		return drop(T_FAILED);
	if (!parse(skb, &in, inner_at(outer), outer->v6, 0) || in.proto != IPPROTO_TCP || (in.flags & (TH_SYN | TH_ACK)) == TH_SYN)
		goto unproven;
	answers = (in.flags & (TH_SYN | TH_ACK | TH_RST)) == (TH_SYN | TH_ACK);
	tn = bpf_map_lookup_elem(&tpot_tunnels, &in.t);
	syn = tn ? NULL : bpf_map_lookup_elem(&tpot_syns, &in.t);
	if (tn && same(tn->peer, outer->t.remote) && same(tn->own, outer->t.local)) {
		tn->ifindex = skb->ifindex;
		note_arrival(skb, tn, &in);
		taken = tn->role == TPOT_TAKER;
		if (answers && tn->role == TPOT_ASKER && !(tn->flags & TPOT_CHOSEN))
			tn->ack = in.seq + 1; /* of a taker that was restarted */
		if (tn->flags & TPOT_COOKIE && has_socket(skb, &in))
			__sync_fetch_and_and(&tn->flags, ~TPOT_COOKIE);
		cookie = tn->flags & TPOT_COOKIE;
		listener = tn->listener;
	} else if (tn && tn->role == TPOT_ASKER && answers) {
		return reset_back(skb, outer, &in, T_SECOND_ANSWER); /* another proxy was faster */
	} else if (syn && syn->role == TPOT_ASKER) {
		struct tuple taker = {};
		struct options *o;

		/* An acknowledgement without SYN is of an earlier connection, which the proxy still has. The socket resets it
		 * (RFC 9293, 3.10.7.3). */
		if (!(in.flags & TH_ACK) || !same(outer->t.local, in.t.local) || (udp && !syn->udp) ||
		    (in.flags & (TH_SYN | TH_RST) && in.ack != syn->seq + 1))
			goto unproven;
		if (syn->answered)
			return answers ? reset_back(skb, outer, &in, T_SECOND_ANSWER) : drop(T_UNPROVEN); /* the server was faster */
		__builtin_memcpy(taker.remote, outer->t.remote, 16);
		if (!rule_for(TPOT_RULE_TRUST, &taker))
			return drop(T_UNTRUSTED);
		if (answers) {
			o = read_options(skb, &in);
			if (!o || !o->size)
				goto unproven;
			if (!may_answer(skb, &in, o, syn, outer->t.remote))
				return drop(T_UNAUTHENTICATED);
			like->role = TPOT_ASKER;
			like->ack = in.seq + 1;
			like->flags = udp ? TPOT_UDP : 0;
			if (udp && (syn->asked > 1 || !(syn->udp & TPOT_WANT_UDP)))
				learn((void *)in.t.remote, TPOT_IN_UDP);
			if (open_tunnel(skb, &in.t, outer->t.remote, outer->t.local, like))
				return drop(T_FAILED);
			forget((void *)in.t.remote);
		}
	} else if (syn && syn->answered && same(syn->peer, outer->t.remote) && same(syn->own, outer->t.local)) {
		taken = 1;
		if (in.flags & TH_RST) { /* the asker has another answer already */
			if (in.seq != syn->seq + 1)
				goto unproven;
			if (handshake_of(syn->listener) != TPOT_BASIC)
				report(skb, &in.t, 0, 0);
		} else if (!(in.flags & TH_ACK) || in.ack != syn->iss + 1) {
			goto unproven;
		} else {
			listener = syn->listener;
			cookie = !has_socket(skb, &in);
			like->role = TPOT_TAKER;
			like->hops = syn->hops;
			like->isn = syn->seq;
			like->ack = syn->seq + 1;
			like->listener = listener;
			like->flags = (cookie ? TPOT_COOKIE : 0) | (udp ? TPOT_UDP : 0);
			if (open_tunnel(skb, &in.t, syn->peer, syn->own, like))
				return drop(T_FAILED);
		}
	} else {
		/* Of a connection that we have forgotten: we were restarted without our tables. As any host does, we reset it.
		 * Rules are about the destination. */
		struct tuple dest = {};

		__builtin_memcpy(dest.remote, in.t.local, 16);
		dest.rport = in.t.lport;
		if (tn || syn || (in.flags & (TH_SYN | TH_ACK | TH_RST)) != TH_ACK || !same(outer->t.remote, in.t.remote) ||
		    !bpf_map_lookup_elem(&tpot_addresses, outer->t.local) || !rule_for(TPOT_RULE_TAKE, &dest))
			goto unproven;
		return reset_back(skb, outer, &in, T_FORGOTTEN);
	}
	r = decapsulate(skb, outer, &in);
	/* With SYN cookies, only the acknowledgement is left of the handshake. The kernel would not find our listener by it. */
	if (r == TCX_NEXT && cookie && assign(skb, listener, 0))
		return drop(T_UNSERVED);
	return r == TCX_NEXT && taken ? deliver(skb) : r;

unproven:
	count(T_UNPROVEN);
	return TCX_NEXT;
}

/* Is there a listener for the SYN of a host that does not ask? */
static __always_inline int takes_plain(const struct packet *p)
{
	struct tuple dest = {};

	__builtin_memcpy(dest.remote, p->t.local, 16); /* rules are about the destination */
	dest.rport = p->t.lport;
	return is_awaited(&p->t) || rule_for(TPOT_RULE_PLAIN, &dest);
}

/* A SYN that is routed on. Packets between asker and server pass our half-open connection with their addresses (syn), which
 * lasts: its answer may be on its way to the asker. But if a listener takes connections of hosts that do not ask, it gets this
 * one. And a socket in TIME-WAIT, whose tunnel is over (old), would make the stack drop the packets. Then end ours by making an
 * RST of the SYN. The asker sends its SYN again. */
static __always_inline int give_up(struct __sk_buff *skb, const struct packet *p, const struct tpot_syn *syn,
				   struct tpot_tunnel *old)
{
	__be32 seq = bpf_htonl(p->seq), expected = bpf_htonl(old ? old->ack : p->seq + 1);
	int r = TCX_NEXT, state;
	__u16 from, to;

	if (!old) {
		if (!syn || syn->role != TPOT_TAKER || syn->seq != p->seq)
			return pass_by(skb, p);
		if (handshake_of(syn->listener) != TPOT_BASIC)
			report(skb, &p->t, 0, 0);
		if (!takes_plain(p))
			return pass_by(skb, p);
	}
	state = has_socket(skb, p);
	if (old && !is_proven_over(old, state))
		return challenge(skb, old, p);
	if (state) {
		if (old && (__s32)(p->seq - old->ack) <= 0) /* an old SYN, which must not end TIME-WAIT (RFC 1337) */
			return TCX_NEXT;
		if (bpf_skb_load_bytes(skb, p->l4 + 12, &from, 2))
			return drop(T_FAILED);
		to = (from & bpf_htons(0xf000)) | bpf_htons(TH_RST);
		if (bpf_skb_store_bytes(skb, p->l4 + 4, &expected, 4, 0) || bpf_skb_store_bytes(skb, p->l4 + 12, &to, 2, 0) ||
		    bpf_l4_csum_replace(skb, p->l4 + 16, seq, expected, 4) ||
		    bpf_l4_csum_replace(skb, p->l4 + 16, from, to, 2))
			return drop(T_FAILED);
		count(T_GIVEN_UP);
		r = deliver(skb);
	}
	bpf_map_delete_elem(&tpot_syns, &p->t);
	bpf_map_delete_elem(&tpot_tunnels, &p->t);
	return r;
}

SEC("tcx/ingress")
int tpot_ingress(struct __sk_buff *skb)
{
	struct packet p = {};
	struct tpot_tunnel *tn, *old = NULL;
	struct options *o;
	struct tpot_syn *syn;
	int r = LEFT_ALONE, is_syn;

	if (skb->pkt_type != PACKET_HOST || (IS_OUR_MARK(skb->mark) && skb->mark != MARK_HELD) || !parse_frame(skb, &p, 0))
		return TCX_NEXT;
	if (skb->mark == MARK_HELD)
		return p.proto == IPPROTO_TCP && (p.flags & (TH_SYN | TH_ACK)) == TH_SYN ? admit(skb, &p) : TCX_NEXT;
	if (p.proto == (p.v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return translate_error(skb, &p);
	if (p.proto != IPPROTO_TCP)
		return from_tunnel(skb, &p);
	tn = bpf_map_lookup_elem(&tpot_tunnels, &p.t);
	is_syn = (p.flags & (TH_SYN | TH_ACK | TH_RST)) == TH_SYN;
	if (tn && is_syn && is_over(tn)) {
		int state = has_socket(skb, &p);

		if (state && state != BPF_TCP_TIME_WAIT) {
			/* it is alive */
		} else if (tn->role == TPOT_TAKER) {
			old = tn; /* until the SYN is answered: a socket in TIME-WAIT or the data path may refuse it */
			tn = NULL;
		} else if (is_proven_over(tn, state)) {
			bpf_map_delete_elem(&tpot_tunnels, &p.t);
			tn = NULL;
		}
	}
	/* The server answers after the proxy: SYN and retransmission took different routes. Or it opens the same connection from its
	 * side (RFC 9293, 3.5). */
	if (tn && tn->role == TPOT_ASKER && (p.flags & (TH_SYN | TH_RST)) == TH_SYN) {
		/* The proxy's answer may not have reached the socket yet, which takes the first one: see was_chosen(). */
		if (!(tn->flags & TPOT_CHOSEN) && note_answer(&p))
			return TCX_NEXT;
		return reset_back(skb, NULL, &p, T_SECOND_ANSWER);
	}
	if (tn && tn->role == TPOT_ASKER)
		return drop(T_PLAIN_REFUSED);
	if (tn) {
		if (is_for_server(skb, tn, &p)) {
			count(T_PASSED_BY);
			return route_on(skb);
		}
		/* The host has forgotten the connection, and does not ask any more. It would not read a challenge in the tunnel. Its
		 * answer to this one ends the connection. */
		if (is_syn && !asks(skb, &p))
			return challenge(skb, tn, &p);
		if (!(p.flags & (TH_SYN | TH_RST)) && !(tn->flags & TPOT_OUTSIDE))
			__sync_fetch_and_or(&tn->flags, TPOT_OUTSIDE);
		note_arrival(skb, tn, &p);
		count(T_PLAIN);
		return deliver(skb);
	}
	if (!(p.flags & (TH_SYN | TH_RST)))
		return pass_by(skb, &p);
	syn = bpf_map_lookup_elem(&tpot_syns, &p.t);
	if (is_syn) {
		o = read_options(skb, &p);
		if (o && o->size == sizeof(struct tpot_option)) {
			r = intercept(skb, &p, o);
			syn = NULL;
		} else {
			count(T_UNASKED);
		}
		if (r == LEFT_ALONE)
			r = intercept_plain(skb, &p);
		return r == LEFT_ALONE ? give_up(skb, &p, syn, old) : r;
	}
	/* The client does not know our half-open connection, which has challenged its SYN: it has another number. The answer to a
	 * challenge acknowledges nothing; an RST that does is about the server's answer to this SYN. */
	if (syn && syn->role != TPOT_ASKER && (p.flags & (TH_SYN | TH_RST)) == TH_RST && p.seq == syn->seq + 1 &&
	    (!(p.flags & TH_ACK) || (syn->answered && p.ack == syn->iss + 1))) {
		if (handshake_of(syn->listener) != TPOT_BASIC)
			report(skb, &p.t, 0, 0);
		return deliver(skb);
	}
	/* The server itself has answered. */
	if (syn && !syn->answered && note_answer(&p)) {
		if (syn->bare) /* something on the path drops segments with the option */
			learn((void *)p.t.remote, TPOT_BARE);
		else if (syn->asked)
			forget((void *)p.t.remote);
	}
	return pass_by(skb, &p);
}

/* ---- packets that leave ---- */

/* A SYN of this host. */
static __always_inline int ask(struct __sk_buff *skb, struct packet *p, __u32 mark)
{
	struct tpot_config *c = configured();
	struct tpot_syn syn = { .seq = p->seq, .role = TPOT_ASKER }, *known;
	struct tpot_option option;
	__u32 about;
	__u8 hops, udp;
	int r;

	if (!c || !(c->rules & 0xffff) || !rule_for(TPOT_RULE_ASK, &p->t))
		return TCX_NEXT;
	/* a proxy asks the next one with what was left when it was asked */
	hops = (mark & 0xffffff00) == MARK_HOPS ? mark : c->hops;
	if (!hops)
		return TCX_NEXT;
	if (c->cgroup && bpf_skb_ancestor_cgroup_id(skb, c->level) != c->cgroup)
		return TCX_NEXT;
	about = known_about(p->t.remote);
	if (about == TPOT_BARE) {
		count(T_AVOIDED);
		return TCX_NEXT;
	}
	udp = !c->udp ? 0 : c->udp == TPOT_UDP_ALWAYS || about == TPOT_IN_UDP ? TPOT_CAN_UDP | TPOT_WANT_UDP : TPOT_CAN_UDP;
	known = bpf_map_lookup_elem(&tpot_syns, &p->t);
	if (known && known->role == TPOT_ASKER && known->seq == p->seq) {
		if (known->asked >= ASK_TIMES) {
			known->bare = 1;
			count(T_NOT_ASKED);
			return TCX_NEXT;
		}
		udp |= known->udp;
		if (c->udp)
			udp |= TPOT_WANT_UDP;
		/* in place: an answer may be noted at the same time */
		known->udp = udp;
		known->asked++;
	} else {
		syn.udp = udp;
		syn.asked = 1;
		if (bpf_map_update_elem(&tpot_syns, &p->t, &syn, BPF_ANY))
			return TCX_NEXT;
	}
	option = our_option(c, sizeof(option), hops, udp);
	r = append(skb, p, &option, sizeof(option));
	if (r < 0)
		return drop(T_FAILED);
	count(r ? T_NO_SPACE : T_ASKED);
	return TCX_NEXT;
}

/* The answer of our listener to an intercepted SYN, or its refusal. */
static __always_inline int answer(struct __sk_buff *skb, struct packet *p, struct tpot_syn *syn)
{
	/* the first answer has not arrived: its tunnel may be the cause */
	int udp = syn->udp & TPOT_WANT_UDP || (syn->udp & TPOT_CAN_UDP && syn->answered);
	struct options *o;

	if ((p->flags & (TH_SYN | TH_ACK)) == (TH_SYN | TH_ACK)) {
		if (p->ack != syn->seq + 1)
			return TCX_NEXT;
		o = read_options(skb, p);
		if (!o || shrink_mss(skb, p, o) || append_answer(skb, p, syn, udp))
			return drop(T_FAILED); /* without the option, the asker would not know its tunnel */
		syn->iss = p->seq;
		syn->answered = 1;
	}
	return encapsulate(skb, p, syn->peer, syn->own, udp);
}

SEC("tcx/egress")
int tpot_egress(struct __sk_buff *skb)
{
	struct packet p = {};
	struct tpot_tunnel *tn;
	struct tpot_syn *syn;
	__u32 mark = skb->mark;
	int r;

	if (mark == MARK_PLAIN || mark == MARK_TAKEN || (mark & 0xffffff00) == MARK_HOPS)
		skb->mark = 0; /* this was the last to know it */
	if (skb->tc_index == INDEX_PASSES) {
		skb->tc_index = 0; /* likewise */
		return TCX_NEXT;
	}
	if (mark == MARK_PLAIN)
		return TCX_NEXT;
	if (!parse_frame(skb, &p, 1) || p.proto != IPPROTO_TCP)
		return TCX_NEXT;
	/* Not ours. The server may have got a SYN that passed here without the option, and its answer has the same addresses. */
	if (p.flags & TH_SYN && skb->ingress_ifindex)
		return TCX_NEXT;
	tn = bpf_map_lookup_elem(&tpot_tunnels, &p.t);
	syn = p.flags & (TH_SYN | TH_RST) && !skb->ingress_ifindex ? bpf_map_lookup_elem(&tpot_syns, &p.t) : NULL;
	/* The port of an earlier connection: of a SYN of this host, or of one that our listener answers. But if the SYN is sent again,
	 * the answer that has opened the tunnel may be on its way to the socket. */
	if (tn && p.flags & TH_SYN && (!(p.flags & TH_ACK) || (syn && syn->role != TPOT_ASKER && p.ack == syn->seq + 1))) {
		if (!(syn && syn->role == TPOT_ASKER && syn->seq == p.seq && !(tn->flags & TPOT_CHOSEN)))
			bpf_map_delete_elem(&tpot_tunnels, &p.t);
		tn = NULL;
	}
	/* The socket has taken a SYN of the server, which opens the same connection: that is its answer. */
	if (syn && syn->role == TPOT_ASKER && (p.flags & (TH_SYN | TH_ACK)) == (TH_SYN | TH_ACK)) {
		syn->iss = p.ack - 1;
		syn->answered = 1;
	}
	if (tn && tn->role == TPOT_ASKER && p.flags & TH_ACK && !(tn->flags & TPOT_CHOSEN) && !was_chosen(tn, &p)) {
		bpf_map_delete_elem(&tpot_tunnels, &p.t);
		tn = NULL;
	}
	if (tn) {
		note_departure(skb, tn, &p);
		r = encapsulate(skb, &p, tn->peer, tn->own, tn->flags & TPOT_UDP);
		if (r != TCX_NEXT || tn->role == TPOT_TAKER)
			return r;
		/* The next hop was chosen for the inner destination. That is the taker's peer, but not the asker's. */
		skb->tc_index = INDEX_PASSES;
		return bpf_redirect_neigh(tn->ifindex, NULL, 0, 0);
	}
	if ((p.flags & (TH_SYN | TH_ACK)) == TH_SYN)
		return ask(skb, &p, mark);
	if (syn && syn->role == TPOT_PLAIN && (p.flags & (TH_SYN | TH_RST)) == TH_SYN && p.ack == syn->seq + 1) {
		syn->iss = p.seq;
		syn->answered = 1;
	}
	return syn && syn->role == TPOT_TAKER ? answer(skb, &p, syn) : TCX_NEXT;
}

/* ---- sockets ---- */

/* The kernel looks for a listening socket: for a SYN that a socket in TIME-WAIT has accepted, or for one of a host that does not
 * ask. It knows ours by an address of loopback only. */
SEC("sk_lookup")
int tpot_lookup(struct bpf_sk_lookup *ctx)
{
	__u32 v4 = ctx->family == AF_INET ? bpf_htonl(0xffff) : 0;
	struct tuple t = { /* the words of the other family are zero */
		.remote = { ctx->remote_ip6[0], ctx->remote_ip6[1], ctx->remote_ip6[2] | v4, ctx->remote_ip6[3] | ctx->remote_ip4 },
		.local = { ctx->local_ip6[0], ctx->local_ip6[1], ctx->local_ip6[2] | v4, ctx->local_ip6[3] | ctx->local_ip4 },
		.rport = ctx->remote_port, .lport = bpf_htons(ctx->local_port),
	};
	struct tpot_syn *syn = ctx->protocol == IPPROTO_TCP ? bpf_map_lookup_elem(&tpot_syns, &t) : NULL;

	if (syn && syn->role != TPOT_ASKER)
		assign(ctx, syn->listener, BPF_SK_LOOKUP_F_REPLACE);
	return SK_PASS;
}
