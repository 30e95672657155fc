/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What happens to a segment while its flow is in control mode or in a switch.
 *
 * Theory of operation. Each direction of a flow has a phase (flow.h) and, during a switch, a bound: one position in the
 * stream, kept in the sequence spaces of both legs. The bytes below it and from it on have different owners, the local socket
 * and the data path, and so have their acknowledgements. A segment from a host carries data of one direction and the
 * acknowledgement of the other. So up to two copies leave: one for the local socket, one for the other host. Everything here is
 * arithmetic on one leg at a time, under that leg's lock; nothing here looks up maps or sends packets. Three rules keep the
 * hosts from ignoring what they receive (docs/switching.md has all of them):
 *   - A segment to a host never acknowledges less than an earlier one did, and its window belongs to its acknowledgement.
 *   - A segment without data carries the highest sequence number sent so far, but not one beyond the host's window
 *     (pure_ack_seq()).
 *   - TSval never goes back.
 */
#ifndef LONGSPLICE_SWITCH_H
#define LONGSPLICE_SWITCH_H

#include "clock.h"
#include "ecn.h"
#include "segment.h"

/* The host's initial sequence number: in64 counts the bytes from there to max_in. */
INLINE __u32 irs(const struct leg *l)
{
	return l->max_in - (__u32)l->in64 - 1;
}

/* Raise max_in to `end`, if that is higher. */
INLINE void advance_in(struct leg *l, __u32 end)
{
	if (after(end, l->max_in)) {
		l->in64 += end - l->max_in;
		l->max_in = end;
		l->flags &= ~LEG_FIN_IN; /* bytes follow it, so it was no FIN of this stream */
	}
}

/* The right edge of the local socket's window (in space). */
INLINE __u32 edge_local(const struct leg *l)
{
	return l->ack_local + l->win_local;
}

/* The local socket's window beyond the bound, bytes: room for what comes once the flow is back in control mode. */
INLINE __u32 room_local(const struct leg *l)
{
	return later(edge_local(l), l->bound_in) - l->bound_in;
}

/* The right edge that the host was told last. edge_out may be higher: after forwarding mode it is an upper limit only. */
INLINE __u32 edge_promised(const struct leg *l)
{
	return l->ack_out + l->win_out;
}

/* The sequence number for a segment without data. It must not be beyond the host's window (RFC 9293, 3.10.7.4). Most hosts take
 * such a segment at the edge of the window. By the letter it must lie below, unless the window is closed. But if the host has got
 * everything, and its acknowledgement is under way, any number below the edge is old. So a segment with news carries the edge.
 * again: it says nothing new, perhaps to a host that has not taken the news. Then it carries one less. */
INLINE __u32 pure_ack_seq(const struct leg *l, int again)
{
	__u32 seq = earlier(l->max_out, l->edge_in);

	return again && seq == l->edge_in && seq != l->ack_in ? seq - 1 : seq;
}

/* Return 0 if the local socket, or the other host, would accept the segment (RFC 9293, 3.10.7.4; RFC 5961, 5), or else a
 * verdict. A refused segment changes no state. Old segments are acceptable up to a window below, since hosts retransmit. A
 * held segment was acceptable when it first arrived. Not for SYN or RST. */
INLINE __u32 refuses(const struct leg *l, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);

	if (!(s->flags & TH_ACK))
		return V_NO_ACK;
	if (after(s->seq, l->edge_out) || (__s32)(l->ack_out - end) > (__s32)(65535 << l->wscale_out) + 1)
		return V_OUT_OF_WINDOW;
	if (is_from_earlier(l, s))
		return V_OLD_TIMESTAMP;
	if (after(s->ack, l->max_out) || (!s->again && (__s32)(l->ack_in - s->ack) > (__s32)(65535 << l->wscale_in)))
		return V_BAD_ACK;
	return 0;
}

/* Are both FINs acknowledged? The host may have forgotten the connection then, and answer late segments with RST. */
INLINE int is_over(const struct leg *l)
{
	return l->flags & LEG_FIN_IN && l->flags & LEG_FIN_ACKED && l->ack_out == l->max_in;
}

/* Does the segment carry new data beyond the limit, or a FIN where there is a limit? */
INLINE int is_beyond(const struct leg *l, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);

	return l->flags & LEG_TRIGGER && after(end, l->max_in) && (s->flags & TH_FIN || after(end, l->limit_in));
}

/* Note that the host has sent more than its limit allows, whatever becomes of it: it may be cut off or dropped, and then arrive
 * again when user space has long taken the connection for one on which the host waits. */
INLINE void note_excess(struct leg *l, const struct seg *s)
{
	__u32 end = s->seq + s->len + !!(s->flags & TH_FIN);

	if (l->flags & LEG_TRIGGER && l->phase_in != PHASE_LOCAL && after(end, l->limit_in) && !refuses(l, s))
		__sync_fetch_and_or(&l->flags, LEG_EXCESS);
}

/* Has everything up to the limit been forwarded? */
INLINE int all_passed(const struct leg *l)
{
	return l->flags & LEG_TRIGGER && l->max_in == l->limit_in;
}

/* Does the proxy keep data in the socket (LIMIT_KEEP) that it has not read? */
INLINE int keeps_data(const struct leg *l)
{
	return l->flags & LEG_TRIGGER && l->limit_in == l->bound_in && l->verbatim != l->bound_in;
}

/* Was a message forwarded whole? */
INLINE int has_passed(const struct leg *l)
{
	return all_passed(l) && l->limit_in != l->bound_in;
}

/* Does the segment return its direction to control mode? Data beyond the limit does so at once, except in a drain that has bytes
 * to forward: there host_segment() drops the excess, and the host retransmits it. */
INLINE int takes_back(const struct leg *l, const struct seg *s)
{
	return is_beyond(l, s) && !refuses(l, s) &&
	       (l->phase_in == PHASE_FWD || (l->phase_in == PHASE_TO_FWD && l->limit_in == l->bound_in));
}

/* Will data of this segment be forwarded? A hint for the MTU check, which comes before the lock is taken. */
INLINE int to_be_forwarded(const struct leg *l, const struct seg *s)
{
	if (!s->len || l->phase_in == PHASE_LOCAL || refuses(l, s))
		return 0;
	if (l->phase_in == PHASE_TO_FWD)
		return after(s->seq + s->len, l->bound_in);
	return l->phase_in == PHASE_FWD || before(s->seq, l->bound_in);
}

/* ---- a segment from a host (host.h): under the lock of the leg where it arrived ---- */

/* Record the acknowledgement, window and timestamp of an acceptable segment. */
INLINE void learn_from_host(struct leg *l, const struct seg *s, struct plan *p)
{
	p->win = (__u32)s->win << l->wscale_in;
	p->in_order_ts = 0;
	if (s->has_ts && is_news(l, s)) {
		follow_floor(l, s->tsval);
		l->tsval_in = s->tsval;
		l->flags &= ~(LEG_UNHEARD | LEG_UNTIMED);
		p->in_order_ts = 1;
	}
	/* The host echoes the last TSval that it accepted (RFC 7323, 4.3). Ours must not be older, whichever clock that came
	 * from. */
	if (s->has_ts && after(s->tsecr, l->tsval_out))
		l->tsval_out = s->tsecr;
	if (!before(s->ack, l->ack_in)) {
		l->ack_in = s->ack;
		l->edge_in = s->ack + p->win;
	}
	if ((l->flags & LEG_FIN_OUT) && s->ack == l->max_out)
		l->flags |= LEG_FIN_ACKED;
}

/* Has the host been sent bytes that the local socket has not sent? That is so while data is forwarded, and also after a drain was
 * taken back: the socket will send the bytes again that were forwarded in the drain. */
INLINE int ahead_of_socket(const struct leg *l)
{
	return l->phase_out != PHASE_LOCAL || l->flags & LEG_AHEAD;
}

/* May the host acknowledge bytes that the local socket has not sent? Only if the leg is in a switch or was in one, or if the
 * socket was recreated. The socket would discard such a segment and all later ones (RFC 9293, 3.10.7.4), so ask_socket() reads
 * how far it has sent. local_out does not tell: if a queue behind egress() is full, the kernel drops the segment and counts it
 * as unsent. */
INLINE int may_be_behind(const struct leg *l)
{
	return !!(l->flags & (LEG_PAIRED | LEG_RESTORED));
}

/* Is the leg in control mode, with the same numbers at the socket and on the wire? */
INLINE int untouched(const struct leg *l)
{
	return l->phase_in == PHASE_LOCAL && !ahead_of_socket(l) && !(l->shim_in | l->shim_out | l->shim_ts);
}

/* Fill in the header of the copy for the local socket. data: it carries data, or a FIN, that belongs to the socket. */
INLINE void edit_for_local(const struct leg *l, const struct seg *s, struct plan *p, int data)
{
	struct edit *e = &p->l;
	__u32 lo = s->ack - FAR, hi = s->ack + FAR;
	__u32 ack = s->ack;

	if (ahead_of_socket(l)) {
		hi = l->local_out;
		ack = earlier(ack, hi);
	}
	if (l->phase_out == PHASE_TO_LOCAL) {
		lo = l->bound_out;
		ack = later(ack, lo);
	}
	if (s->socket_known && !after(s->ack, l->max_out)) { /* the socket has to see that a forged one is wrong */
		hi = earlier(hi, s->socket_sent + l->shim_out);
		ack = earlier(ack, hi);
	}
	/* A socket that has received both the host's FIN and the acknowledgement of its own is gone. But while its
	 * acknowledgement of the host's FIN is held back, the host retransmits the FIN, and that needs a socket. So hide the
	 * other acknowledgement. */
	if (l->phase_in == PHASE_TO_LOCAL && l->flags & LEG_FIN_OUT && ack == l->max_out)
		ack--;
	/* A bare acknowledgement may have a sequence number behind lost data, which may be forwarded when it is retransmitted.
	 * Do not show the socket such a number: later segments below it would look old, and their windows be ignored (RFC
	 * 9293, 3.10.7.4). */
	e->seq = (data ? s->seq : l->phase_in == PHASE_LOCAL ? earlier(s->seq, l->max_in) : l->ack_local) - l->shim_in;
	e->ack = ack - l->shim_out;
	e->tsval = s->tsval;
	e->tsecr = s->tsecr - l->shim_ts;
	e->sack_add = -l->shim_out;
	e->sack_lo = lo;
	e->sack_hi = hi;
	e->win = s->win;
	e->urg = s->urg;
	e->strip_ts = e->strip_sack = e->strip_ecn = 0;
}

/* Was the flow reset by a socket of ours, or by the other host, and not by this leg's host? */
INLINE int is_given_up(const struct leg *l)
{
	return (l->flags & (LEG_RESET | LEG_RESET_IN)) == LEG_RESET;
}

/* Was the flow reset before the host had acknowledged all that was forwarded to it? An unsplice does not wait for that then
 * (unsplice_out()). */
INLINE int lacks_forwarded(const struct leg *l)
{
	return (l->flags & (LEG_PAIRED | LEG_RESET)) == (LEG_PAIRED | LEG_RESET) && before(l->ack_in, l->bound_out);
}

/* Is the leg in a switch, or is the host ahead of the socket after one? */
INLINE int is_switching(const struct leg *l)
{
	return l->phase_in | l->phase_out || l->flags & LEG_AHEAD;
}

/* Largest payload that a packet can be cut to, bytes: bpf_skb_change_tail() allows 16064 bytes with all headers (BPF_SKB_MAX_LEN
 * with pages of 4 KB). */
#define MOST_CUT (11 * 1448)

/* Payload bytes up to `end`, or fewer if a super-packet cannot be cut there: then the host has to retransmit the rest. */
INLINE __u32 cut_at(const struct seg *s, __u32 end)
{
	__u32 keep = end - s->seq;

	return keep < s->len && keep > MOST_CUT ? MOST_CUT : keep;
}

/* Limit of held bytes for one direction of a flow: a large window, much of which was sent twice. */
#define MOST_HELD (8 << 20)

/* Must the segment be held? After the drain, segments that would overtake held ones are held as well, but never the next one in
 * order: held segments are lost if their process dies, and then the host's retransmissions must get through. */
INLINE int is_to_be_held(const struct leg *l, const struct seg *s, __u32 end)
{
	if (!(l->flags & LEG_HOLD))
		return 0;
	if (l->phase_in == PHASE_TO_FWD)
		return after(end, l->bound_in);
	return !s->again && after(s->seq, l->max_in) && l->held + s->len <= MOST_HELD;
}

/* Enter PHASE_FWD. Holding ends, unless held segments have still to be forwarded. */
INLINE void forwards(struct leg *l)
{
	l->phase_in = PHASE_FWD;
	if (!before(l->max_in, l->held_in))
		l->flags &= ~LEG_HOLD;
}

/* Is the FIN of the socket false, because bytes are missing before it? The kernel sends such a FIN for a process that died with
 * bytes in hand: below the bound of a drain, or in place of bytes that were forwarded in a drain that was taken back. */
INLINE int is_false_end(const struct leg *l, __u32 end)
{
	if (l->phase_out == PHASE_TO_FWD)
		return before(end, l->bound_out);
	return l->flags & LEG_AHEAD && before(end - !(l->flags & LEG_FIN_OUT), l->max_out);
}

/* ---- a segment from the local socket: under the leg's lock ---- */

/* Is the RST from a socket of an earlier connection with the same addresses, which is closed just now? It acknowledges what has
 * not arrived. Fragments, and segments that came while no program was attached, have arrived unseen. */
INLINE int is_of_earlier(const struct leg *l, __u32 ack)
{
	__u32 first = irs(l) + 1;

	if (!(l->flags & LEG_TRACKED) || l->flags & LEG_FRAGMENTS)
		return 0;
	return l->in64 < FAR ? ack - first > l->max_in - first : after(ack, l->max_in);
}

/* Translate the segment to the numbers of the wire. room: right edge of the other host's window (in space of `l`). Returns 0
 * if the socket is muted. */
INLINE int local_segment(struct leg *l, const struct seg *s, struct plan *p, __u32 room)
{
	struct edit *e = &p->l;
	__u32 fin = !!(s->flags & TH_FIN);
	__u32 seq = s->seq + l->shim_out;
	__u32 end = seq + s->len + fin;
	__u32 ack = s->ack + l->shim_in;
	__u32 win = (__u32)s->win << l->wscale_out;
	int bare = 0, again = 0;

	p->dropped = V_LOCAL_MUTED;
	if ((s->flags & (TH_RST | TH_ACK)) == (TH_RST | TH_ACK) && is_of_earlier(l, ack))
		return 0;
	/* The socket relies on what it has announced, muted or not: record it for the unsplice. */
	if ((s->flags & TH_ACK) && !before(ack, l->ack_local)) {
		l->ack_local = ack;
		l->win_local = win;
	}
	/* Muted, except that the socket of a flow that was reset before its commit may reset its host, too. */
	if (l->phase_in == PHASE_FWD && l->phase_out == PHASE_FWD && !(l->flags & LEG_RESET && s->flags & TH_RST))
		return 0;
	e->keep = s->len;
	e->flags = s->flags;
	e->strip_ts = e->strip_sack = e->strip_ecn = 0;
	/* The socket of a flow that was reset cannot deliver anything. Nor can its probes open a window: the host waits for bytes that
	 * nobody will send again. A probe below all that it has got is another matter: it asks for the number of the reset, which a
	 * host that was ahead has ignored. */
	if (s->flags & TH_RST || (fin && is_false_end(l, end)) ||
	    (is_given_up(l) && is_switching(l) && (end != seq || (lacks_forwarded(l) && !before(seq, l->ack_in))))) {
		e->flags = s->flags & TH_RST ? s->flags : TH_RST | TH_ACK;
		e->keep = 0;
		/* The host accepts an RST only with exactly the number that it expects next (RFC 5961, 3.2). */
		if (is_switching(l) || lacks_forwarded(l))
			seq = l->ack_in;
		l->flags |= LEG_RESET;
	} else if (end != seq) {
		if (l->phase_out == PHASE_FWD)
			return 0;
		/* The socket may have missed the last acknowledgement: its copy was lost or old, or is held back, and the host
		 * has no reason to repeat it. The socket then retransmits bytes from before an unsplice. Under the new shim
		 * they must not be sent, since other bytes were forwarded at these numbers. Send a keep-alive instead (RFC
		 * 9293, 3.8.4): the answer carries the acknowledgement. */
		if (l->phase_out == PHASE_LOCAL)
			l->bound_out = later(l->bound_out, l->ack_in);
		if (l->shim_out && !(l->flags & LEG_AHEAD) && before(seq, l->phase_out == PHASE_TO_FWD ? l->ack_in : l->bound_out)) {
			l->local_out = later(l->local_out, earlier(end, l->ack_in));
			e->flags = TH_ACK;
			e->keep = fin = 0;
			seq = end = l->ack_in - 1;
		}
		if (l->phase_out == PHASE_TO_FWD && after(end, l->bound_out)) {
			/* The socket was closed in the drain: its FIN is not that of the stream. */
			if (!fin || end != l->bound_out + 1)
				return 0;
			e->flags &= ~TH_FIN;
			end--;
			fin = 0;
			if (end == seq)
				return 0;
		}
		l->local_out = later(l->local_out, end);
		l->max_out = later(l->max_out, end);
		if (fin)
			l->flags |= LEG_FIN_OUT;
	} else if (ahead_of_socket(l) && !before(seq, earlier(l->ack_in, l->local_out))) {
		bare = 1; /* window probes have a number below ack_in, and keep it */
	} else if (l->flags & LEG_PROBE && seq == l->ack_in - 1) {
		/* ... except the first probe after an unsplice: the host would ignore the window of a segment that looks old. */
		bare = 1;
		l->flags &= ~LEG_PROBE;
	}

	if (s->flags & TH_ACK) {
		if (l->phase_in == PHASE_TO_FWD && after(ack + win, room))
			win = after(room, ack) ? room - ack : 0;
		if (l->phase_in == PHASE_FWD) {
			ack = l->ack_out;
			win = l->win_out;
		} else if (before(ack, l->ack_out) || (l->phase_in == PHASE_TO_LOCAL && before(l->ack_out, l->bound_in))) {
			win = later(ack + win, l->ack_out) - l->ack_out; /* the same right edge */
			ack = l->ack_out;
		}
		again = ack == l->ack_out && win == l->win_out;
		l->ack_out = ack;
		l->win_out = win;
	}
	e->seq = bare ? pure_ack_seq(l, again) : seq;
	e->ack = ack;
	e->win = window_field(win, l->wscale_out);
	if (s->flags & TH_ACK)
		l->edge_out = later(l->edge_out, ack + ((__u32)e->win << l->wscale_out));
	point_at_urgent(e, s, l->shim_out);
	e->sack_add = l->shim_in;
	e->sack_lo = s->ack - FAR;
	e->sack_hi = s->ack + FAR;
	e->tsecr = s->tsecr;
	if (s->has_ts) {
		if (l->flags & LEG_CLOCK && !(l->flags & LEG_END_TO_END))
			l->shim_ts = l->tsval_out - s->tsval;
		l->flags &= ~LEG_CLOCK;
		if (l->flags & LEG_END_TO_END)
			e->tsval = shared_tsval(l, s->tsval);
		else
			e->tsval = our_tsval(l, s->tsval, 1, &l->shim_ts);
	}
	return 1;
}

/* ---- the switches: each step under the lock of the leg named first ---- */

/* Has the sender been promised more than the receiver has room for? A switch would lose the segments under way beyond that room,
 * and the sender would need a timeout to retransmit them. out: end of the bytes written to the receiver's socket or in hand for
 * it (out space of `to`). */
INLINE int overpromised(const struct leg *from, const struct half *h, __u32 out, const struct leg *to)
{
	return h->limit != LIMIT_KEEP && after(edge_promised(from) - (irs(from) + 1 + h->consumed) + out, to->edge_in);
}

/* With LIMIT_KEEP, does the socket lack data below the bound? The other host's acknowledgements will stand for the kept data from
 * the freeze on. So the socket must have all of it: it has acknowledged everything, or the proxy has read everything. */
INLINE int has_gaps(const struct leg *from, const struct half *h)
{
	return h->limit == LIMIT_KEEP && from->ack_local != from->max_in && irs(from) + 1 + h->consumed != from->max_in;
}

/* Would the proxy keep the end of this stream while the other stream may end in forwarding mode? The flow would be over then,
 * before the kept data was read. */
INLINE int keeps_end(const struct leg *from, const struct half *h, const struct half *other)
{
	return h->limit == LIMIT_KEEP && other->limit == LIMIT_NONE && from->flags & LEG_FIN_IN;
}

/* Have all bytes up to the limit arrived, so that nothing is left to forward? */
INLINE int all_has_come(const struct leg *from, const struct half *h)
{
	return h->limit <= LIMIT_MAX &&
	       (from->flags & LEG_FIN_IN || from->max_in - (irs(from) + 1 + h->consumed) >= h->limit);
}

/* Splice, direction from -> to, step 1: set the bound. out: as for overpromised(). Returns the number of bytes left to read
 * from the socket, counting a FIN as one. */
INLINE __u32 freeze_in(struct leg *from, const struct half *h, __u32 out, __u32 *bound_out, __u32 hold)
{
	__u32 taken = irs(from) + 1 + h->consumed;
	__u32 pending = h->limit == LIMIT_KEEP ? 0 : from->max_in - taken;

	from->bound_in = from->max_in;
	from->verbatim = taken;
	*bound_out = out + pending;
	from->seq_off = *bound_out - from->bound_in;
	from->phase_in = PHASE_TO_FWD;
	from->held_in = from->bound_in;
	from->held = 0;
	from->limit_in = h->limit == LIMIT_KEEP ? from->bound_in : taken + h->limit;
	from->flags &= ~(LEG_HOLD | LEG_TRIGGER | LEG_BYPASSED | LEG_PROBE | LEG_EXCESS);
	if (hold)
		from->flags |= LEG_HOLD;
	if (h->limit != LIMIT_NONE)
		from->flags |= LEG_TRIGGER;
	return pending;
}

/* Step 2. tsval: the sender's latest. Returns 1 if there is nothing to drain. */
INLINE int freeze_out(struct leg *to, __u32 bound_out, __u32 tsval)
{
	to->bound_out = bound_out;
	to->ts_from_peer = to->tsval_out - tsval;
	to->phase_out = before(to->ack_in, bound_out) ? PHASE_TO_FWD : PHASE_FWD;
	return to->phase_out == PHASE_FWD;
}

/* Step 3, if step 2 returned 1. Data beyond a limit may have taken the direction back meanwhile. */
INLINE void freeze_done(struct leg *from)
{
	if (from->phase_in == PHASE_TO_FWD)
		forwards(from);
}

/* Unsplice, direction from -> to, step 1: take back a splice whose drain is not over. The sender got no acknowledgement beyond
 * its bound, so it still has those bytes. The receiver may have them, too, and acknowledge them (ahead_of_socket()). */
INLINE void stop_drain(struct leg *to)
{
	if (to->phase_out != PHASE_TO_FWD)
		return;
	to->phase_out = PHASE_LOCAL;
	to->bound_out = to->ack_in;
	if (after(to->max_out, to->local_out))
		to->flags |= LEG_AHEAD;
}

/* Step 2: return the bytes from `at` on to the socket; `at` is not below max_in. Returns 1 if the direction was being
 * forwarded. */
INLINE int unsplice_in(struct leg *from, const struct leg *to, __u32 at)
{
	from->flags &= ~LEG_HOLD;
	if (from->phase_in == PHASE_TO_FWD) /* the drain may have ended before step 1: then it counts as forwarded */
		from->phase_in = *(volatile __u8 *)&to->phase_out == PHASE_FWD ? PHASE_FWD : PHASE_LOCAL;
	if (from->phase_in != PHASE_FWD)
		return 0;
	from->flags |= LEG_BYPASSED;
	/* The socket's window moves with its numbers. Everything up to the old bound was read from it. The receiver's window was
	 * passed on to the sender, and is not taken back (RFC 9293, 3.8.6): user space has the socket make room for as much. Except
	 * behind a message that was forwarded whole: its sender now waits, and the next message must not come far ahead. */
	from->win_local = room_local(from);
	if (!has_passed(from))
		from->win_local = later(at + from->win_local, *(volatile __u32 *)&to->edge_in - from->seq_off) - at;
	from->ack_local = at;
	from->shim_in += at - from->bound_in;
	from->bound_in = at;
	from->win_out = later(edge_local(from), from->ack_out) - from->ack_out;
	from->phase_in = before(from->ack_out, at) ? PHASE_TO_LOCAL : PHASE_LOCAL;
	return 1;
}

/* Step 3, if step 2 returned 1. at: the same position in the receiver's out space. Returns 1 if it is acknowledged already, or
 * will never be. */
INLINE int unsplice_out(struct leg *to, __u32 at)
{
	to->shim_out += at - to->bound_out;
	to->bound_out = at;
	to->local_out = at;
	to->max_out = later(to->max_out, at);
	to->phase_out = before(to->ack_in, at) && !(to->flags & LEG_RESET) ? PHASE_TO_LOCAL : PHASE_LOCAL;
	return to->phase_out == PHASE_LOCAL;
}

/* Step 4, if step 3 returned 1. */
INLINE void unsplice_done(struct leg *from)
{
	if (from->phase_in == PHASE_TO_LOCAL) {
		from->phase_in = PHASE_LOCAL;
		/* ack_out stays below the bound until the next segment. Only duplicates can arrive below the bound now. */
	}
}

#endif
