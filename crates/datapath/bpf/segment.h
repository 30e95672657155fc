/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A segment, and what is to be done with it; sequence numbers (RFC 9293, 3.4). */
#ifndef LONGSPLICE_SEGMENT_H
#define LONGSPLICE_SEGMENT_H

#include "flow.h"

#define TH_FIN 0x01
#define TH_SYN 0x02
#define TH_RST 0x04
#define TH_ACK 0x10
#define TH_URG 0x20
#define TH_ECE 0x40
#define TH_CWR 0x80

/* A segment as it came in; host byte order. */
struct seg {
	__u32 seq, ack, len; /* len: payload bytes, FIN not counted */
	__u32 tsval, tsecr;
	__u16 win, urg;
	__u8 flags;
	__u8 has_ts;
	__u8 again; /* it was held, and comes once more */
	__u8 ecn;   /* ECN_BITS of the IP header */
};

/* One outgoing copy of it; host byte order. */
struct edit {
	__u32 seq, ack, tsval, tsecr;
	__u32 keep;               /* payload bytes kept, from the front */
	__u32 sack_add;           /* added to SACK edges ... */
	__u32 sack_lo, sack_hi;   /* ... which are first clamped to this range */
	__u16 win, urg;
	__u8 flags;
	__u8 strip_ts, strip_sack;
	__u8 strip_ecn;           /* congestion marks, of IP and of TCP */
};

enum hold {
	HOLD_NOT = 0,
	HOLD = 1,
	HOLD_FULL = 2, /* there is no room */
};

/* What is to be done with it. */
struct plan {
	__u8 local, fwd;       /* send this copy */
	__u8 fwd_data;         /* the forwarded copy carries data or FIN */
	__u8 ack_valid;        /* `ack` is meant for the other host */
	__u8 in_order_ts;      /* not older than what was seen: may move the TSval offset */
	__u8 drained, returned;/* the acknowledged direction has completed TO_FWD / TO_LOCAL */
	__u8 plain;            /* the local copy is the segment as it came */
	__u8 hold;             /* enum hold: the segment as it came is to be held, besides: from ... */
	__u8 ecn;              /* the leg it came from has LEG_ECN */
	__u8 lose_local, lose_fwd; /* this copy is dropped for its congestion mark (ecn.h) */
	__u8 events;           /* for user space: 1 << enum event_kind */
	enum verdict dropped;  /* if neither copy is sent; 0: it is held, or there was no room for that */
	__u32 ack;             /* in the out space of the leg it came from */
	__u32 fwd_end;
	__u32 held_from;          /* ... this byte of its payload on */
	__u32 win;             /* bytes */
	__s32 acked;           /* the other host has acknowledged all up to here, counted from ... */
	__u64 at;              /* ... the stream position of the segment */
	struct edit l, f;
};

#define INLINE static inline __attribute__((always_inline))

/* Before a loop: the compiler of the programs takes it apart. Others (model.c) do not know this. */
#ifdef __bpf__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL
#endif

INLINE int before(__u32 a, __u32 b) { return (__s32)(a - b) < 0; }
INLINE int after(__u32 a, __u32 b) { return (__s32)(a - b) > 0; }
INLINE __u32 later(__u32 a, __u32 b) { return after(a, b) ? a : b; }
INLINE __u32 earlier(__u32 a, __u32 b) { return before(a, b) ? a : b; }

/* The largest scaled window (RFC 7323, 2.3) stays below 2^30: so far from the middle SACK edges are left unclamped. */
#define FAR 0x40000000u

/* The window field for so many bytes. One that is open stays open: whoever hears of none waits to be told of another. It may
 * then say more, by less than one unit of its scale; what there is no room for is cut off and sent again. */
INLINE __u16 window_field(__u32 bytes, __u32 scale)
{
	__u32 win = bytes >> scale;

	if (win > 0xffff)
		return 0xffff;
	return win ? win : !!bytes;
}

/* The end of what is urgent, in the numbers that the segment came with (RFC 9293, 3.8.5). */
INLINE __u32 urgent_end(const struct seg *s)
{
	return s->seq + s->urg;
}

/* It stays where it is in the stream, and its pointer counts from the number that a copy goes out with. `shift`: from the numbers
 * that the segment came with to those of the copy. */
INLINE void point_at_urgent(struct edit *e, const struct seg *s, __u32 shift)
{
	__u32 ahead = urgent_end(s) + shift - e->seq;

	e->urg = s->urg;
	if (!(e->flags & TH_URG))
		return;
	if (ahead - 1 < 0xffff)
		e->urg = ahead;
	else /* behind it, or too far ahead to be told */
		e->flags &= ~TH_URG;
}

#endif
