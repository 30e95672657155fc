/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Congestion marks (ECN, RFC 3168) across two connections, each of which has negotiated ECN by itself.
 *
 * A host negotiates ECN with our socket, in SYN and SYN-ACK. LEG_ECN is the result, derived from both as they pass. The socket
 * has concluded the same from them, whatever made it ask (a sysctl, a route), and the flag outlives the socket. In a splice:
 *   - If both legs have negotiated ECN (PATH_ECN), ECT, CE, ECE and CWR pass unchanged, and the hosts deal with each other.
 *   - Otherwise neither host gets any: all of them are cleared in forwarded segments (edit.strip_ecn). CE from a host that has
 *     negotiated ECN (PATH_ECT) means congestion on its way to us, but the other host would not echo it. So the segment is
 *     dropped, as by a router that cannot mark (RFC 6040, 4.2; RFC 3168, 9.1.1), and the loss tells its sender. CE from a host
 *     that has not negotiated ECN means nothing, and is cleared.
 * A drop must be a signal and not a stall. So the segment counts as forwarded, and as lost behind us. Its retransmission is
 * recognised and passes without its mark, even if the network marks everything. A segment without data would not be
 * retransmitted, so it always passes without its mark.
 *
 * Sockets created with TCP_REPAIR have no ECN, and it cannot be enabled. Their hosts still use what they negotiated: CE for these
 * sockets is dropped in the same way, and the sockets ignore ECE. Their own segments carry no marks.
 *
 * A parked socket may be in the middle of an exchange: it repeats ECE, waits for it, or owes a CWR, while the host's answers go
 * to the other host. After an unsplice, the next data brings the CWR that ends it, or the socket answers once: one reduction
 * too many.
 *
 * AccECN (RFC 9768) counts marks per connection in the same bits, and two counts cannot be joined. It is offered to nobody
 * (classic_ecn()), and both ends fall back to RFC 3168, as RFC 9768, 3.1.2, provides.
 *
 * A super-packet whose CWR is cleared keeps SKB_GSO_TCP_ECN, which only clears CWR in all its segments but the first. */
#ifndef LONGSPLICE_ECN_H
#define LONGSPLICE_ECN_H

#include "segment.h"

/* The ECN field: the low two bits of the type of service or traffic class (RFC 3168, 5). */
#define ECN_BITS 3
#define ECN_CE 3

/* Does the segment carry CE together with new data? come: end of the data that has arrived before. */
INLINE int is_marked(__u32 ecn, __u32 seq, __u32 len, __u32 come)
{
	return ecn == ECN_CE && len && after(seq + len, come);
}

/* Plan which copies to drop for a mark that their receivers would not echo. come: max_in before the segment. local_end: end of
 * the data for the socket. */
INLINE void plan_marks(const struct leg *l, const struct seg *s, struct plan *p, __u32 come, __u32 local_end)
{
	int marked = l->flags & LEG_ECN && is_marked(s->ecn, s->seq, s->len, come);

	p->ecn = !!(l->flags & LEG_ECN);
	p->lose_local = marked && l->flags & (LEG_END_TO_END | LEG_RESTORED) && after(local_end, come);
	p->lose_fwd = marked && p->fwd_data && after(p->fwd_end, come);
}

/* The rest of that, for the leg where the forwarded copy leaves. */
INLINE void join_marks(const struct leg *o, struct plan *p)
{
	p->f.strip_ecn = !(p->ecn && o->flags & LEG_ECN);
	p->lose_fwd &= p->f.strip_ecn;
}

/* Cancel the copies that must be dropped for their marks. Returns 1 if there was one. */
INLINE int lose_marked(struct plan *p)
{
	int lost = (p->local & p->lose_local) | (p->fwd & p->lose_fwd);

	p->local &= !p->lose_local;
	p->fwd &= !p->lose_fwd;
	return lost;
}

/* PATH_ECT and PATH_ECN for the direction from -> to. */
INLINE __u16 ecn_flags(const struct leg *from, const struct leg *to)
{
	__u16 f = from->flags & LEG_ECN ? PATH_ECT : 0;

	return from->flags & to->flags & LEG_ECN ? f | PATH_ECN : f;
}

/* In forwarding mode: must the segment be dropped for its mark? */
INLINE int path_loses(union path_word w, __u32 ecn, __u32 seq, __u32 len)
{
	return (w.flags & (PATH_ECT | PATH_ECN)) == PATH_ECT && is_marked(ecn, seq, len, w.end);
}

#endif
