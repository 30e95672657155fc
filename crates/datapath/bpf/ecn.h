/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Congestion marks (ECN, RFC 3168) of two connections that were agreed on one by one.
 *
 * A host agrees on marks with our socket, by SYN and SYN-ACK. LEG_ECN is what these said as they passed: it is what the socket
 * has concluded from them, whatever made it ask (a sysctl, a route), and it outlives the socket. A splice joins two legs:
 *   - Both have agreed (PATH_ECN): ECT, CE, ECE and CWR pass as they are, and the hosts deal with each other.
 *   - Otherwise no host gets any: all of them are taken out of what is forwarded (edit.strip_ecn). CE that comes from a host that
 *     has agreed (PATH_ECT) is congestion on its way to us, and the other host would not echo it. The segment is dropped, as a
 *     router does that cannot mark (RFC 6040, 4.2; RFC 3168, 9.1.1): the loss tells its sender. CE from a host that has not
 *     agreed is nobody's word, and is taken out.
 * A drop is to be a signal, and never a standstill. So the segment counts as forwarded, and as lost right behind us: what comes
 * again is known to come again, and passes without its mark, even where a network marks all that it carries. Without data there
 * is nothing that would be sent again: such a segment passes without its mark.
 *
 * Sockets made by TCP_REPAIR have no ECN, and nothing can give it to them. Their host goes on as it has agreed: CE for them is
 * dropped in the same way, and ECE means nothing to them. What they send says nothing of ECN.
 *
 * A parked socket may be left in the middle of an exchange: it repeats ECE, or waits for it, or owes a CWR. Whatever the host has
 * said meanwhile went elsewhere. Taken back, it is answered by CWR with the next data, or answers once: one reduction too many.
 *
 * AccECN (RFC 9768) counts marks within a connection, in the same bits. Two counts cannot be joined. It is not offered to anyone
 * (classic_ecn), and both ends fall back to RFC 3168, as its 3.1.2 has it.
 *
 * A large packet whose CWR is taken out keeps SKB_GSO_TCP_ECN: that only takes CWR out of all its segments but the first. */
#ifndef LONGSPLICE_ECN_H
#define LONGSPLICE_ECN_H

#include "segment.h"

/* The last two bits of the type of service, or traffic class (RFC 3168, 5). */
#define ECN_BITS 3
#define ECN_CE 3

/* Do these bytes bring a mark for the first time? `come`: the end of all that has come. */
INLINE int is_marked(__u32 ecn, __u32 seq, __u32 len, __u32 come)
{
	return ecn == ECN_CE && len && after(seq + len, come);
}

/* Whom would a mark be lost upon? `come`: as it was before the segment; the socket gets data up to local_end. */
INLINE void plan_marks(const struct leg *l, const struct seg *s, struct plan *p, __u32 come, __u32 local_end)
{
	int marked = l->flags & LEG_ECN && is_marked(s->ecn, s->seq, s->len, come);

	p->ecn = !!(l->flags & LEG_ECN);
	p->lose_local = marked && l->flags & (LEG_FOREIGN | LEG_RESTORED) && after(local_end, come);
	p->lose_fwd = marked && p->fwd_data && after(p->fwd_end, come);
}

/* The same for the leg where the forwarded copy goes out. */
INLINE void join_marks(const struct leg *o, struct plan *p)
{
	p->f.strip_ecn = !(p->ecn && o->flags & LEG_ECN);
	p->lose_fwd &= p->f.strip_ecn;
}

/* Takes away the copies that are lost. Was there any? */
INLINE int lose_marked(struct plan *p)
{
	int lost = (p->local & p->lose_local) | (p->fwd & p->lose_fwd);

	p->local &= !p->lose_local;
	p->fwd &= !p->lose_fwd;
	return lost;
}

INLINE __u16 ecn_flags(const struct leg *from, const struct leg *to)
{
	__u16 f = from->flags & LEG_ECN ? PATH_ECT : 0;

	return from->flags & to->flags & LEG_ECN ? f | PATH_ECN : f;
}

/* In forwarding mode: is this segment dropped for its mark? */
INLINE int path_loses(union path_word w, __u32 ecn, __u32 seq, __u32 len)
{
	return (w.flags & (PATH_ECT | PATH_ECN)) == PATH_ECT && is_marked(ecn, seq, len, w.end);
}

#endif
