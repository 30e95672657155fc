/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A segment, the plan for it, and arithmetic on sequence numbers (RFC 9293, 3.4). */
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

/* A segment as it arrived; host byte order. */
struct seg {
	__u32 seq, ack, len; /* len: payload, bytes; a FIN does not count */
	__u32 tsval, tsecr;
	__u16 win, urg;
	__u8 flags;
	__u8 has_ts;
	__u8 again; /* 1 for a held segment that arrives a second time (hold.h) */
	__u8 ecn;   /* ECN_BITS of the IP header */
	__u8 socket_known; /* the next two are known */
	__u32 socket_sent; /* the end of what the local socket has sent (SND.NXT), in its own numbers */
	__u32 socket_next; /* what it expects next (RCV.NXT), in its own numbers */
};

/* The header of an outgoing copy; host byte order. */
struct edit {
	__u32 seq, ack, tsval, tsecr;
	__u32 keep;               /* payload bytes to keep, from the front */
	__u32 sack_add;           /* added to SACK edges ... */
	__u32 sack_lo, sack_hi;   /* ... after they were limited to this range, both ends included */
	__u16 win, urg;
	__u8 flags;
	__u8 strip_ts, strip_sack; /* blank this option */
	__u8 strip_ecn;           /* clear congestion marks, in IP and in TCP */
	__u8 stamp;               /* of a question (emit.h): it has timestamps, even if the segment has none */
};

enum hold {
	HOLD_NOT = 0,
	HOLD = 1,
	HOLD_FULL = 2, /* hold, but there is no room */
};

/* The plan for a segment. */
struct plan {
	__u8 local, fwd;       /* send the copy for the socket / for the other host */
	__u8 fwd_data;         /* the forwarded copy carries data or a FIN */
	__u8 ack_valid;        /* `ack` is for the other host */
	__u8 in_order_ts;      /* the TSval is not older than earlier ones, and may change the TSval offset */
	__u8 drained, returned;/* this acknowledgement completes TO_FWD / TO_LOCAL of the direction that it belongs to */
	__u8 plain;            /* the local copy is the unchanged segment */
	__u8 hold;             /* enum hold: hold the segment as well, from byte held_from of its payload on */
	__u8 ecn;              /* the leg where it arrived has LEG_ECN */
	__u8 lose_local, lose_fwd; /* drop this copy for its congestion mark (ecn.h) */
	__u8 events;           /* for user space: 1 << enum event_kind */
	enum verdict dropped;  /* if neither copy is sent; 0: it is held, or could not be */
	__u32 ack;             /* in the out space of the leg where it arrived */
	__u32 fwd_end;         /* sequence end of the forwarded copy, in the in space of the leg where it arrived */
	__u32 held_from;
	__u32 win;             /* window that the segment announces, bytes */
	__s32 acked;           /* highest acknowledgement of the other host, relative to `at` */
	__u64 at;              /* stream position of the segment */
	struct edit l, f;      /* headers of the local and of the forwarded copy */
};

#define INLINE static inline __attribute__((always_inline))

/* A function that the verifier checks once, with any arguments. Where the code is not compiled for BPF (model.c): of the file. */
#ifdef __bpf__
#define GLOBAL __attribute__((noinline))
#else
#define GLOBAL static __attribute__((unused))
#endif

/* Comparisons modulo 2^32. */
INLINE int before(__u32 a, __u32 b) { return (__s32)(a - b) < 0; }
INLINE int after(__u32 a, __u32 b) { return (__s32)(a - b) > 0; }
INLINE __u32 later(__u32 a, __u32 b) { return after(a, b) ? a : b; }
INLINE __u32 earlier(__u32 a, __u32 b) { return before(a, b) ? a : b; }

/* A distance beyond any acceptable segment: the largest scaled window is below 2^30 (RFC 7323, 2.3). SACK edges that are
 * limited to this distance from the acknowledgement are in effect not limited. */
#define FAR 0x40000000u

/* Convert a window in bytes to the header field. An open window stays open, since a host that was told of a closed one waits for
 * the next announcement. The field may then promise too much, by less than one unit of the scale. Bytes without room are cut off
 * and retransmitted. */
INLINE __u16 window_field(__u32 bytes, __u32 scale)
{
	__u32 win = bytes >> scale;

	if (win > 0xffff)
		return 0xffff;
	return win ? win : !!bytes;
}

/* The end of the urgent data, in the numbers of the segment as it arrived (RFC 9293, 3.8.5). */
INLINE __u32 urgent_end(const struct seg *s)
{
	return s->seq + s->urg;
}

/* Set the urgent pointer of a copy, which is relative to the copy's sequence number, so that the urgent data keeps its place
 * in the stream. shift: from the numbers of the segment as it arrived to those of the copy. */
INLINE void point_at_urgent(struct edit *e, const struct seg *s, __u32 shift)
{
	__u32 ahead = urgent_end(s) + shift - e->seq;

	e->urg = s->urg;
	if (!(e->flags & TH_URG))
		return;
	if (ahead - 1 < 0xffff)
		e->urg = ahead;
	else /* below the copy, or too far ahead for the field */
		e->flags &= ~TH_URG;
}

#endif
