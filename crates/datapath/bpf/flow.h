/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The layout shared with user space: the only definition of it. User space gets its view from the object's BTF.
 *
 * Words: a *leg* is our end of one connection, with a host at its other end. A *flow* is two legs. Per leg there are two
 * sequence spaces on the wire: "in" (the host's bytes) and "out" (bytes to the host). The local socket may lag behind the
 * wire by a *shim* in either space. All sequence numbers here are those of the wire, host byte order, unless said otherwise.
 */
#ifndef LONGSPLICE_FLOW_H
#define LONGSPLICE_FLOW_H

#include "compat.h"

/* Numbers that user space has to know besides. */
enum constant {
	/* Raised with every change of what this file, maps.h, table.h and place.h put into pinned maps: a process takes over only
	 * maps of its own version. */
	ABI_VERSION = 16,
	MAX_VIAS = 1024,      /* next hop and own address pairs: few, since hosts sit behind routers */
	MAX_LISTENERS = 1024, /* addresses that are listened on, transparent or not */
	/* In path.via: forwarded data is copied to user space (tap.h). No such next hop: the short way goes no further. */
	VIA_TAP = 0x8000,
	/* In path.via: the window that came with max_ack, rounded up (room_code() in path.h). */
	VIA_ROOM_SHIFT = 10,
	VIA_ROOM = 31 << VIA_ROOM_SHIFT,
	VIA_INDEX = (1 << VIA_ROOM_SHIFT) - 1,
	/* In embryo.opts_in: the handshake is complete, but there was no room for a leg. */
	OPT_FULL = 0x10,
};

/* A connection as one leg sees it. Network byte order; IPv4 as ::ffff:a.b.c.d. */
struct tuple {
	__u32 remote[4];
	__u32 local[4];
	__u16 rport;
	__u16 lport;
};

/* The same for IPv4, as the key of the first look-up. */
struct tuple4 {
	__u32 remote;
	__u32 local;
	__u16 rport;
	__u16 lport;
};

/* Who owns the bytes of one direction (sender -> receiver). Kept in the sender's leg as phase_in, in the receiver's as
 * phase_out; the bound is the same position in either's sequence space. */
enum phase {
	PHASE_LOCAL = 0,    /* the proxy: control mode */
	PHASE_TO_FWD = 1,   /* below the bound the proxy (it drains), from the bound on the data path */
	PHASE_FWD = 2,      /* the data path: forwarding mode */
	PHASE_TO_LOCAL = 3, /* below the bound the data path (until acknowledged), from the bound on the proxy */
};

enum leg_flag {
	LEG_TS = 1 << 0,       /* timestamps negotiated (RFC 7323) */
	LEG_SACK = 1 << 1,     /* selective acknowledgements negotiated (RFC 2018) */
	LEG_PAIRED = 1 << 2,   /* `peer` is valid */
	LEG_SPLICED = 1 << 3,  /* the path entries rule; this record is stale until woken */
	LEG_HOLD = 1 << 4,     /* what is to be forwarded is held (hold.h): until the drain is over, and all that was has been */
	LEG_FRAGMENTS = 1 << 5,/* fragments came or went: the tracker cannot vouch for max_in, max_out */
	LEG_FIN_IN = 1 << 6,   /* the host has sent FIN */
	LEG_FIN_OUT = 1 << 7,  /* FIN was sent to the host */
	LEG_FIN_ACKED = 1 << 8,/* ... and acknowledged by it */
	LEG_RESET = 1 << 9,    /* RST seen */
	LEG_TRACKED = 1 << 10, /* handshake seen from the SYN on */
	LEG_TRIGGER = 1 << 11, /* what the host sends beyond `limit_in` takes the flow back to control mode */
	LEG_SYN = 1 << 12,     /* our SYN was sent, its answer awaited */
	LEG_CLOCK = 1 << 13,   /* the socket's next TSval continues ours */
	LEG_AHEAD = 1 << 14,   /* the host was sent more than the socket has sent, or has heard acknowledged */
	LEG_RESET_IN = 1 << 15, /* ... and it came from this leg's host */
	LEG_BYPASSED = 1 << 16,  /* when the host's direction was taken back, it was forwarded: its socket was passed by */
	LEG_TAP = 1 << 17,     /* what is forwarded is copied to user space, both directions alike */
	LEG_FOREIGN = 1 << 18, /* neither address is ours: the host believes to speak to the other one (handshake.h) */
	LEG_ECN = 1 << 19,     /* congestion marks negotiated (RFC 3168; ecn.h) */
	LEG_RESTORED = 1 << 20, /* the socket was made anew, by TCP_REPAIR */
	LEG_FAST_CLOCK = 1 << 21, /* the host's timestamps tick much faster than every millisecond */
	LEG_PROBE = 1 << 22,   /* the socket probes when it may speak again: its host may have gone, or wait for a window */
};

struct leg {
	struct bpf_spin_lock lock;
	__u32 flags;
	struct tuple peer;
	__u8 phase_in, phase_out;
	__u8 wscale_in, wscale_out; /* shift of windows announced by the host / by us */
	__u16 mss_in, mss_out;      /* announced by the host / by us, bytes */
	__u32 irs, iss;             /* initial sequence numbers */
	/* from the host */
	__u32 max_in;    /* highest end ever passed up or forwarded */
	__u32 bound_in;
	__u32 limit_in;  /* up to here the host's bytes may be forwarded (LEG_TRIGGER) */
	__u32 ack_in;    /* highest acknowledgement, in out space */
	__u32 edge_in;   /* right edge of its window, in out space */
	__u32 tsval_in;
	/* to the host */
	__u32 max_out;   /* highest end sent by anyone */
	__u32 local_out; /* highest end sent by the local socket */
	__u32 bound_out;
	__u32 ack_out;   /* highest acknowledgement sent by anyone, in in space */
	__u32 win_out;   /* the window sent with it, bytes */
	__u32 edge_out;  /* highest right edge promised */
	__u32 ack_local; /* highest acknowledgement by the local socket, in in space */
	__u32 win_local;
	__u32 tsval_out;
	/* wire = socket + shim */
	__u32 shim_in, shim_out, shim_ts;
	/* the peer's out space = our in space + seq_off; our TSval = the peer host's TSval + ts_from_peer */
	__u32 seq_off, ts_from_peer;
	__u32 verbatim;  /* from this position in in space on, bytes are relayed unchanged */
	__u32 held_in;   /* LEG_HOLD: highest end that was held, in in space */
	__u32 held;      /* ... and how many bytes were, since the freeze */
	/* next hop to the host, as learned from what the local socket sends */
	__u32 ifindex;
	__u8 dmac[6], smac[6];
	__u32 mark;      /* of its packets: rules of routing may go by it */
	__u64 in64;      /* stream position of max_in: bytes since the SYN, 64-bit */
	__u64 seen;      /* ns, CLOCK_MONOTONIC */
};

/* ---- forwarding mode: one entry per direction, found by the tuple of the leg where the packet comes in ---- */

enum path_flag {
	PATH_SPLICED = 1 << 0,
	PATH_FIN = 1 << 1,       /* FIN passed; end is its end */
	PATH_PEER_FIN = 1 << 2,  /* FIN passed in the other direction, not acknowledged yet */
	PATH_FIN_ACKED = 1 << 3, /* this direction's FIN was acknowledged */
	PATH_DEAD = 1 << 4,      /* a RST in order has passed: the flow is over */
	PATH_STRIP_TS = 1 << 5,  /* the far side has no timestamps */
	PATH_STRIP_SACK = 1 << 6,
	PATH_TRIGGER = 1 << 7,   /* what lies beyond the leg's limit_in is the proxy's; `wraps` is its high half */
	PATH_CROSS = 1 << 8,     /* the other leg is of the other address family; remote4 is an index into remotes6 */
	PATH_RST = 1 << 9,       /* the RST came from this direction's sender */
	PATH_FRAGMENTS = 1 << 10,/* fragments were forwarded, in this direction or the other: no way back (fragment.h) */
	PATH_IDENTITY = 1 << 11, /* both connections have the same addresses, ports and numbers: nothing to rewrite but IP */
	PATH_ECT = 1 << 12,      /* the sender has negotiated congestion marks: what it sends may be marked */
	PATH_ECN = 1 << 13,      /* ... and so has the receiver: marks pass */
	PATH_TRACE = 1 << 14,    /* segments are traced (trace.h); in control mode, too */
};

/* Changes as one 64-bit word, so that an unsplice can stop it at a definite position. */
union path_word {
	__u64 all;
	struct {
		__u32 end;   /* highest sequence end forwarded, in in space */
		__u16 wraps; /* how often it wrapped; PATH_TRIGGER: high half of the limit, less than 2^31 away */
		__u16 flags; /* enum path_flag */
	};
};

struct path {
	union path_word word;
	/* These four change as one 64-bit word, too (struct path_acked). */
	__u32 max_ack;   /* highest acknowledgement forwarded, in out space of this leg */
	__u16 via;       /* index into vias, VIA_ROOM and VIA_TAP */
	__u8 scales;     /* low 4 bits: shift of windows in; high 4: out */
	__u8 seen;       /* coarse time of the last packet, units of 2^33 ns */
	__u32 seq_add, ack_add, tsval_add, tsecr_add;
	__u16 rport, lport; /* of the leg where the packet goes out, network order */
	__u32 remote4;      /* its host, if IPv4; network order */
};

struct path4 {
	struct path p;
};

struct path6 {
	struct path p;
	__u32 remote[4];
};

/* Where entries lie (table.h, place.h). */
struct slot {
	__u64 hop;   /* as a home: which of its places hold its keys */
	__u32 state; /* as a place: taken, or since when not */
	__u32 key[];
};

struct slot4 {
	__u64 hop;
	__u32 state;
	struct tuple4 key;
	struct path4 p;
};

struct slot6 {
	__u64 hop;
	__u32 state;
	struct tuple key;
	struct path6 p;
	__u64 fill[3];
};

enum via_flag {
	VIA_XDP = 1 << 0,           /* the device sends frames that XDP redirects to it */
	VIA_XDP_FRAGMENTS = 1 << 1, /* ... also those in several buffers */
	VIA_PEER = 1 << 2,          /* packets go to the device's other end, in another network namespace */
};

/* Next hop and own address, shared by many flows. */
struct via {
	__u32 ifindex;
	__u32 mtu;      /* bytes of IP packet: of the device, `most` at most */
	__u8 dmac[6], smac[6];
	__u32 local[4]; /* our address on the outgoing leg; network order, IPv4-mapped */
	enum via_flag flags;
	__u32 most;     /* bytes of IP packet that the hosts behind it take, and the paths to them */
	__u32 mark;     /* with which the route is asked for: what a firewall has put on packets of sockets that send here */
};

/* A connection that is not established yet, seen through its SYN. */
struct embryo {
	__u32 irs, iss;
	__u32 tsval_in, tsval_out;
	__u16 mss_in, mss_out;
	__u8 wscale_in, wscale_out;
	__u8 opts_in, opts_out; /* LEG_TS, LEG_SACK, OPT_WSCALE, OPT_ECN as offered by the host / by us; OPT_FOREIGN, OPT_FULL */
	__u32 edge_out;
	__u32 ifindex;
	__u8 dmac[6], smac[6];
};
#define OPT_WSCALE 0x80
#define OPT_FOREIGN 0x40 /* opts_in: LEG_FOREIGN */
#define OPT_ECN 0x20

/* A segment that comes in fragments, as the host sends it (RFC 791, 3.2; RFC 8200, 4.5); the protocol is TCP. Network order. */
struct train_key {
	__u32 remote[4];
	__u32 local[4];
	__u32 id;
};

/* What its first fragment has told. */
struct train {
	__u64 when;     /* ns, CLOCK_MONOTONIC, coarse */
	__u32 seq;      /* host order, and so is `id` */
	__u32 id;       /* the identification that it goes out with */
	__u16 rport, lport;         /* network order */
	__u16 out_rport, out_lport; /* of the leg where it goes out: another flow of the same ports differs in these */
	__u8 doff;      /* TCP header, bytes */
	__u8 fin;
	__u8 fill[6];
};

/* ---- events, system-call programs ---- */

enum event_kind {
	EVENT_FORWARDING = 1, /* both directions are forwarded: commit may follow */
	EVENT_CONTROL = 2,    /* both directions are back in control mode */
	EVENT_TRIGGERED = 3,  /* the data path has begun an unsplice by itself */
	EVENT_CLOSED = 4,     /* both FINs acknowledged */
	EVENT_RESET = 5,
	EVENT_OVERSIZE = 6,   /* segments do not fit, and the sender keeps sending them */
	EVENT_LIMIT_REACHED = 7,     /* all up to the limit was forwarded */
};

/* What `at` of a tap_record is. */
enum tap_position {
	TAP_STREAM = 0,   /* the stream position */
	TAP_EXTENDED = 1, /* the sequence number, wraps since the commit in the upper half: switch_args.origin has to be added */
	TAP_LOW = 2,      /* the sequence number; the limit is less than 2^31 away */
};

/* Before each piece of a forwarded segment in the ring of copies. */
struct tap_record {
	struct tuple leg; /* where it came in */
	__u32 kind;       /* enum tap_position */
	__u64 at;         /* of the first byte */
	__s32 acked;      /* the other host has acknowledged all up to here, counted from `at` */
	__u32 len;        /* bytes that follow */
};

/* A segment as it came, or as a copy of it left; host order. */
struct trace_copy {
	__u32 seq, ack;
	__u32 len;   /* payload, bytes */
	__u16 win;   /* as in the header */
	__u8 flags;  /* of the TCP header: its 14th byte */
	__u8 is;     /* there is such a copy */
};

/* A segment of a flow that is traced. */
struct trace_record {
	struct tuple leg;  /* where it came in, or whose socket has sent it */
	__u32 from_socket;
	__u64 when;        /* ns, CLOCK_MONOTONIC */
	__u64 verdicts;    /* bits by enum verdict: a segment may be counted more than once */
	struct trace_copy came, forwarded, local;
};

/* Indices of `tracing`. */
enum trace_word {
	TRACE_UNTIL = 0, /* ns, CLOCK_MONOTONIC: whoever traces moves it on, and when it has passed, traces end by themselves */
	TRACE_LOST = 1,  /* records for which there was no room */
	TRACE_MAX = 2,
};

struct event {
	struct tuple leg;
	enum event_kind kind;
};

/* What a host sends may be forwarded up to a limit: values of half.limit that are none. */
enum limit {
	LIMIT_MAX = 0x40000000, /* bytes, from those on that were taken from the socket */
	LIMIT_NONE = 0xfffffffe,
	LIMIT_KEEP = 0xffffffff, /* nothing: the proxy keeps what is in the socket, and gets what comes */
};

/* One half of a splice, as user space sees it: positions are stream positions, FINs counting one. */
struct half {
	struct tuple leg;
	__u32 consumed;  /* in: bytes taken from the socket */
	__u32 produced;  /* in: bytes given to the socket */
	__u32 leftover;  /* in: bytes in hand from this leg for the other */
	enum limit limit; /* in: OP_FREEZE: bytes not taken yet that may be forwarded, or enum limit */
	__u32 pending;   /* out: OP_FREEZE: bytes still to be read from the socket; OP_UNSPLICE: was the direction forwarded? */
	__u32 start;     /* out: stream position of the bound, low 32 bits */
	__u32 seq;       /* out: OP_FREEZE: its sequence number */
	__u32 fin;       /* out: the FIN lies below the bound: end of stream is pending too, and counted, or was forwarded */
	__u32 flags;     /* out: enum leg_flag */
	enum phase phase_in; /* out */
};

enum switch_op {
	OP_FREEZE = 1,   /* bounds set, TO_FWD */
	OP_COMMIT = 2,   /* FWD -> path entries */
	OP_UNSPLICE = 3, /* back, whatever the phases are */
	OP_LOOK = 5,     /* phases and positions only */
	OP_STOP = 6,     /* a released flow, if idle: its path entries stop */
	OP_RESUME = 7,   /* and go on */
};

enum switch_result {
	SWITCH_OK = 0,
	SWITCH_UNTRACKED = 1,
	SWITCH_BUSY = 2,      /* an earlier switch is not over */
	SWITCH_CLOSING = 3,
	SWITCH_FRAGMENTS = 4,
	SWITCH_MISMATCH = 5,  /* the counts cannot be right */
	SWITCH_FULL = 6,
	SWITCH_WINDOW = 7,    /* OP_FREEZE with `fit`: a host may still send more than the other has room for */
	SWITCH_SHORT = 8,     /* OP_FREEZE: all up to the limit has come */
	SWITCH_SILENT = 9,    /* OP_FREEZE: a host was silent for so long that its clock may have gone half round */
};

struct switch_args {
	enum switch_op op;
	enum switch_result result;
	__u32 hold;
	__u32 fit;           /* OP_FREEZE: not before the windows promised to either host fit the other's; OP_STOP: only if it is idle */
	__u32 trigger;       /* OP_COMMIT: the limit is here for a (bit 0), for b (bit 1) */
	__u32 tap;           /* OP_FREEZE: what is forwarded is copied to user space */
	struct half a, b;
	__u16 via_a, via_b;  /* OP_COMMIT: next hop towards a, b */
	__u32 remote_a, remote_b; /* OP_COMMIT: index into remotes6, when the families differ */
	__u64 end_a, end_b;  /* out: stream position of all that came from a, b */
	__u64 origin_a, origin_b; /* out: what makes a stream position of an extended sequence number of a, b (tap_position) */
};

/* Next hop to a leg's host, as in its record. */
struct hop {
	__u32 ifindex;
	__u32 macs[3]; /* dmac, smac */
	__u32 mss;     /* announced by the host */
	__u32 mark;
};

/* Hops stand by themselves: the programs have no room for more on their stack. */
struct switch_call {
	struct switch_args args;
	struct hop hop_a, hop_b; /* out */
};

enum path_op {
	PATH_GET = 1,
	PATH_ADD = 2,    /* a new entry, all zero, and a leg's record that awaits the answer to our SYN */
	PATH_PUT = 3,    /* an entry as given, new or not */
	PATH_REMOVE = 4, /* and the leg's record; both of `other`, too, unless it is all zero */
	PATH_CLEAR = 5,  /* the same, unless the port has been used for a new connection since, which lives */
	PATH_UNTAP = 6,  /* no more copies; of the leg's record, too */
	PATH_NEXT = 7,   /* the first entry from slot number `slot` on, which becomes the one behind it */
	PATH_UNSEEN = 8, /* segments have passed that the data path has not seen: of the leg's record alone */
	PATH_IDLE = 9,   /* as PATH_NEXT, of those that are in control mode, and what the leg's record says */
	PATH_SWEEP = 10, /* as PATH_REMOVE, if all is still as PATH_IDLE has found it, and not in forwarding mode */
	PATH_RETURN = 11, /* as PATH_REMOVE, for legs that were never in a switch: their sockets go on without */
	PATH_MOVE = 12,   /* an entry in forwarding mode whose next hop is p_other.via gets p.p.via */
	PATH_STOPPED = 13, /* as PATH_NEXT, of those that are not in forwarding mode */
	PATH_HOP = 14,     /* the leg's record gets the next hop p.p.via, for what is forwarded to its host in a switch */
	PATH_TRACED = 15,   /* PATH_TRACE is set */
	PATH_UNTRACED = 16, /* ... or cleared */
};

/* User space's way to one path entry. */
struct path_args {
	enum path_op op;
	__s32 result; /* 0; -1 no place; PATH_GET: 1 there is none, or not both; PATH_CLEAR, PATH_SWEEP, PATH_RETURN: 1 key stays,
	               * 2 other stays, or both; PATH_MOVE, PATH_HOP: 1 it is as it was; PATH_NEXT and the like: 1 none yet,
	               * -1 there are no more; PATH_ADD: 1 there is one,
	               * 2 `other` is not tracked, -2 no place, and `other` has given its own back */
	struct tuple key;
	struct tuple other; /* PATH_ADD: the leg on whose behalf; PATH_GET: its entry is wanted as well; nobody's if all zero */
	__u32 mss;          /* PATH_ADD: out: announced by its host */
	__u32 leg_flags;    /* PATH_ADD: of the record, besides LEG_SYN; PATH_IDLE: out: of the record, 0: there is none */
	__u32 irs, iss;     /* PATH_IDLE: out: of the record. No other connection of the same addresses has both */
	__u32 ifindex;      /* PATH_IDLE: out: of the record */
	__u32 fill;
	__u64 slot;         /* PATH_NEXT and the like */
	struct path6 p; /* without `remote` if the key is IPv4 */
	struct path p_other; /* PATH_GET: the one of `other` */
};

/* A segment of the handshake of a foreign connection, for user space to pass on: its headers. */
struct handshake {
	struct tuple leg; /* where it came in */
	__u8 ip[40];      /* IPv4: 20 bytes, without options */
	__u8 tcp[60];
	__u32 payload;    /* bytes that it carries besides */
};

/* Before each piece of a segment that is held: its headers. IP options are not kept, as for a segment that is forwarded. */
struct held_record {
	struct tuple leg; /* where it came in */
	__u32 ifindex;
	__u32 at, len;    /* of the payload: where the piece begins, and the bytes that follow here */
	__u32 payload;    /* bytes in all */
	__u16 segment;    /* payload bytes of each segment of a large packet; 0: it is not one */
	__u8 eth[14];
	__u8 ip[40];      /* IPv4: 20 bytes */
	__u8 tcp[60];
};

/* Indices of `holding`: bytes that all flows together have had held since the process began. */
enum held_bytes {
	HELD_GIVEN = 0, /* by the data path to user space */
	HELD_BACK = 1,  /* ... which has sent them on their way again */
	HELD_MAX = 2,
};

/* Values of `listeners`. */
enum listens {
	LISTENS = 1,
	LISTENS_FOREIGN = 2, /* to connections of others, which pass here */
};

/* Of the maps that are there: written when they are made. */
struct abi {
	__u32 version;
	__u32 unused;
	__u64 seed;
	__u64 namespace; /* SO_NETNS_COOKIE: another namespace may have got the number that the folder is named after */
};

/* A listening address; all-zero address: any. Network order. */
struct listen_key {
	__u32 local[4];
	__u16 port;
	__u16 family; /* 4 or 6 */
};

enum verdict {
	V_FORWARDED,        /* spliced, rewritten and sent on */
	V_FORWARDED_SLOW,   /* the same through the switching code */
	V_LOCAL,            /* given to the local socket */
	V_BOTH,             /* forwarded and given to the local socket */
	V_LOCAL_OUT,        /* sent by the local socket */
	V_LOCAL_MUTED,      /* local socket's segment dropped: the flow is forwarded */
	V_HELD,             /* held by user space under the hold policy, until the drain is over */
	V_OUT_OF_WINDOW,    /* sequence number not acceptable */
	V_BAD_ACK,          /* acknowledgement not acceptable */
	V_BAD_RST,          /* RST outside of the window, or after the end */
	V_SYN,              /* SYN on a live flow */
	V_CHALLENGE,        /* answered with a challenge ACK */
	V_CHALLENGE_LIMITED,/* not answered: rate limit */
	V_RST,              /* RST relayed */
	V_TTL,              /* hop limit reached zero */
	V_OVERSIZE,         /* did not fit the MTU: dropped, and its sender told by ICMP */
	V_FRAGMENT,         /* first fragment of a flow that is switching, or segment behind an IPv6 extension header */
	V_STRADDLE,         /* a part of a segment across the bound was left to retransmission */
	V_NO_PEER,          /* the other leg's record is gone */
	V_REWRITE_FAILED,   /* a helper refused: out of memory */
	V_TABLE_FULL,
	V_STALE_CPU,        /* gave up racing with other CPUs for one entry */
	V_FORWARDED_EARLY,  /* spliced, by XDP */
	V_ICMP_TRANSLATED,  /* ICMP error about a forwarded segment passed on to its sender */
	V_FRAGMENT_FORWARDED, /* fragment of a spliced flow, rewritten and sent on */
	V_FRAGMENT_STRAY,   /* later fragment of a TCP segment without a first one that was forwarded: left to the stack */
	V_FRAGMENT_LATE,    /* later fragment of a flow that is no longer in forwarding mode */
	V_FRAGMENT_TINY,    /* first fragment that does not hold the whole TCP header */
	V_FRAGMENT_OVERLAP, /* later fragment that reaches into the TCP header, or beyond what a datagram can hold */
	V_FRAGMENT_CROSS,   /* fragment that would have to change the address family */
	V_TAPPED,           /* a piece of a forwarded segment was copied to user space */
	V_TAP_LOST,         /* ... or was not: its reader is behind. The segment went on all the same */
	V_HANDSHAKE,        /* segment of a foreign connection's handshake, given to user space */
	V_HANDSHAKE_LOST,   /* ... or dropped, for user space is behind: its sender will send it again */
	V_RST_UNPROVEN,     /* RST not in order: its sender is asked what it means, no state moves */
	V_NO_ACK,           /* segment without ACK that is neither SYN nor RST */
	V_BAD_CHECKSUM,     /* TCP checksum wrong */
	V_HOLD_OVERFLOW,    /* to be held, but there was no room: dropped, its sender will send it again */
	V_BEYOND_LIMIT,     /* beyond the limit of a splice that drains: dropped, its sender will send it again */
	V_CE_DROPPED,       /* congestion mark for who would not echo it: dropped, and its sender hears of it by the loss */
	V_CUT,              /* did not fit the MTU: the part that fits was sent on */
	V_UNWATCHED,        /* of a flow that was spliced, by a device that nothing is attached to: dropped (guard.h) */
	V_MAX,
};

#endif
