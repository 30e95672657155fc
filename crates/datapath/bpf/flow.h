/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The only definition of the layout shared with user space, which generates its view of it from the object's BTF.
 *
 * Words: a *leg* is our end of one connection; the machine at the other end is its *host*. A *flow* is two legs. Each leg has two
 * sequence spaces on the wire: *in space* numbers the bytes from the host, *out space* the bytes to it. The local socket's
 * numbers may lag behind those on the wire by a *shim*, one per space. Sequence numbers in this file are those on the wire, in
 * host byte order, unless noted otherwise.
 */
#ifndef LONGSPLICE_FLOW_H
#define LONGSPLICE_FLOW_H

#include "compat.h"

/* Constants that user space needs, too. */
enum constant {
	/* Raise this with every change to what this file, maps.h, table.h or place.h put into pinned maps. A process takes over
	 * only maps of its own version. */
	ABI_VERSION = 20,
	MAX_VIAS = 1024,      /* pairs of next hop and own address: few, since most hosts are behind routers */
	MAX_LISTENERS = 1024, /* listening addresses, transparent or not */
	PORT_CLASSES = 1024,  /* of ports, by their low bits: a power of two */
	/* Bit of path.via: copy forwarded data to user space (tap.h). With it, path.via is no index into vias, so the short way
	 * finds no next hop and leaves the packet to the general way. */
	VIA_TAP = 0x8000,
	/* Bits of path.via: the window announced with max_ack, rounded up (room_code() in step.h). */
	VIA_ROOM_SHIFT = 10,
	VIA_ROOM = 31 << VIA_ROOM_SHIFT,
	/* Bits of path.via: index into vias. */
	VIA_INDEX = (1 << VIA_ROOM_SHIFT) - 1,
	/* Bit of embryo.opts_in: the handshake is complete, but the table had no room for the leg. */
	OPT_FULL = 0x10,
	/* Bit of embryo.opts_out: nobody has answered yet, but segments of the client have passed. */
	OPT_PASSED = 0x01,
	CLEAR_FLOWS = 32, /* limit of clear_call.count: two bits for each fit into clear_call.kept */
};

/* The four-tuple of a connection as one leg sees it. Network byte order; IPv4 addresses as ::ffff:a.b.c.d. */
struct tuple {
	__u32 remote[4];
	__u32 local[4];
	__u16 rport;
	__u16 lport;
};

/* The same for IPv4: the key of the first look-up. Network byte order. */
struct tuple4 {
	__u32 remote;
	__u32 local;
	__u16 rport;
	__u16 lport;
};

/* Who owns the bytes of one direction (sender -> receiver). The sender's leg keeps it as phase_in, the receiver's leg as
 * phase_out. bound_in and bound_out are likewise one position, each in its own leg's sequence space. */
enum phase {
	PHASE_LOCAL = 0,    /* the proxy: control mode */
	PHASE_TO_FWD = 1,   /* below the bound the proxy, which drains them; from the bound on the data path */
	PHASE_FWD = 2,      /* the data path: forwarding mode */
	PHASE_TO_LOCAL = 3, /* below the bound the data path, until they are acknowledged; from the bound on the proxy */
};

enum leg_flag {
	LEG_TS = 1 << 0,       /* timestamps negotiated (RFC 7323) */
	LEG_SACK = 1 << 1,     /* selective acknowledgements negotiated (RFC 2018) */
	LEG_PAIRED = 1 << 2,   /* `peer` is valid */
	LEG_SPLICED = 1 << 3,  /* the path entries are authoritative; this record is stale until wake() */
	LEG_HOLD = 1 << 4,     /* data to be forwarded is held (hold.h) until the drain is over and all held data was forwarded */
	LEG_FRAGMENTS = 1 << 5,/* fragments were received or sent: max_in and max_out cannot be trusted */
	LEG_FIN_IN = 1 << 6,   /* the host has sent a FIN */
	LEG_FIN_OUT = 1 << 7,  /* a FIN was sent to the host */
	LEG_FIN_ACKED = 1 << 8,/* ... and the host has acknowledged it */
	LEG_RESET = 1 << 9,    /* the connection was reset, by either end */
	LEG_TRACKED = 1 << 10, /* the data path has seen the connection from its SYN on, or has adopted it (adopt.h) */
	LEG_TRIGGER = 1 << 11, /* data from the host beyond limit_in takes the flow back to control mode */
	LEG_SYN = 1 << 12,     /* user space opens this connection; the SYN-ACK has not arrived yet. Until then, LEG_TS and LEG_SACK
				* mean that our SYN may offer these options */
	LEG_CLOCK = 1 << 13,   /* set shim_ts from the socket's next TSval, so that it continues tsval_out */
	LEG_AHEAD = 1 << 14,   /* the host was sent bytes that the socket has not sent, or not seen acknowledged */
	LEG_RESET_IN = 1 << 15, /* with LEG_RESET: the RST came from this leg's host */
	LEG_BYPASSED = 1 << 16,  /* the host's direction was being forwarded, past its socket, when it was taken back */
	LEG_TAP = 1 << 17,     /* forwarded data is copied to user space, in both directions */
	LEG_TRANSPARENT = 1 << 18, /* the socket's address is not ours: the host sees the other host's (handshake.h, tpot.h) */
	LEG_ECN = 1 << 19,     /* congestion marks negotiated (RFC 3168; ecn.h) */
	LEG_RESTORED = 1 << 20, /* the socket was recreated with TCP_REPAIR */
	LEG_FAST_CLOCK = 1 << 21, /* the host's timestamp clock ticks much faster than 1 kHz */
	LEG_PROBE = 1 << 22,   /* the socket probes when it is unmuted: its host may be gone, or wait for the window to open */
	LEG_END_TO_END = 1 << 23, /* the hosts shook hands: same numbers, clocks, options on both legs (handshake.h) */
	LEG_WAITS = 1 << 24,   /* data from the host is held (hold.h) until user space has decided whether to splice */
	LEG_UNHEARD = 1 << 25, /* tsval_in is so old that TSvals cannot be compared with it (clock.h) */
	LEG_EXCESS = 1 << 26,  /* since the freeze, the host has sent data or a FIN beyond limit_in */
	LEG_UNTIMED = 1 << 27, /* no TSval of the host has come since the unsplice: its latest one is not known (clock.h) */
	LEG_TOLD = 1 << 28,    /* a reset was forwarded to the host, which had acknowledged all that was sent to it: it accepts that */
};

/* The record of a leg. `lock` protects it; docs/switching.md (Concurrency) lists what is accessed without the lock. */
struct leg {
	struct bpf_spin_lock lock;
	__u32 flags;                /* enum leg_flag */
	struct tuple peer;          /* key of the flow's other leg (LEG_PAIRED); server's leg: of the client's, as of PATH_OP_ADD */
	__u8 phase_in, phase_out;   /* enum phase of the direction from the host / to the host */
	__u8 wscale_in, wscale_out; /* window scale (shift) announced by the host / by us */
	__u16 mss_in, mss_out;      /* announced by the host / by us, bytes */
	__u32 iss;                  /* our initial sequence number; the host's is irs() */
	/* received from the host */
	__u32 max_in;    /* highest sequence end ever passed up or forwarded */
	__u32 bound_in;  /* bound of the direction from the host */
	__u32 limit_in;  /* end of the bytes from the host that may be forwarded (LEG_TRIGGER) */
	__u32 ack_in;    /* highest acknowledgement (out space) */
	__u32 edge_in;   /* right edge of the host's window (out space) */
	__u32 tsval_in;  /* latest TSval */
	__u32 floor_in;  /* no segment of this connection has an older TSval: that of the SYN, or far behind the latest */
	/* sent to the host */
	__u32 max_out;   /* highest sequence end sent, by the socket or by the data path */
	__u32 local_out; /* highest sequence end sent by the local socket */
	__u32 bound_out; /* bound of the direction to the host */
	__u32 ack_out;   /* highest acknowledgement sent, by the socket or by the data path (in space) */
	__u32 win_out;   /* window sent with it, bytes */
	__u32 edge_out;  /* highest right edge ever promised (in space) */
	__u32 ack_local; /* highest acknowledgement sent by the local socket, muted or not (in space) */
	__u32 win_local; /* window sent with it, bytes */
	__u32 tsval_out; /* latest TSval */
	/* wire = socket + shim */
	__u32 shim_in, shim_out, shim_ts;
	/* the peer's out space = our in space + seq_off; our TSval = the peer host's TSval + ts_from_peer */
	__u32 seq_off, ts_from_peer;
	__u32 verbatim;  /* bytes from this position on are relayed unchanged (in space) */
	__u32 held_in;   /* LEG_HOLD: highest sequence end that was held (in space) */
	__u32 held;      /* LEG_HOLD: bytes held since the freeze */
	/* next hop to the host, learned from the packets that the local socket sends */
	__u32 ifindex;
	__u8 dmac[6], smac[6];
	__u32 mark;      /* firewall mark of the socket's packets: policy routing may use it */
	__u32 clock_in;  /* the host's clock less ours, ms (clock.h) */
	__u64 in64;      /* stream position of max_in: bytes since the SYN, 64 bits */
	__u64 seen;      /* ns, CLOCK_MONOTONIC: when the host was last heard (clock.h) */
};

/* ---- forwarding mode: one path entry per direction, found by the tuple of the leg where the packet arrives ---- */

enum path_flag {
	PATH_SPLICED = 1 << 0,   /* the entry is in force: packets are forwarded by it */
	PATH_FIN = 1 << 1,       /* a FIN was forwarded; `end` is its sequence end */
	PATH_PEER_FIN = 1 << 2,  /* a FIN was forwarded in the other direction, and is not acknowledged yet */
	PATH_FIN_ACKED = 1 << 3, /* the FIN of this direction was acknowledged */
	PATH_DEAD = 1 << 4,      /* an RST in order was forwarded: the flow is over */
	PATH_STRIP_TS = 1 << 5,  /* the receiver has not negotiated timestamps: blank them */
	PATH_STRIP_SACK = 1 << 6, /* the receiver has not negotiated SACK: blank it */
	PATH_TRIGGER = 1 << 7,   /* data beyond the leg's limit_in belongs to the proxy; `wraps` is the limit's upper half */
	PATH_CROSS = 1 << 8,     /* IPv4 in, IPv6 out: remote4 is an index into remotes6 */
	PATH_RST = 1 << 9,       /* with PATH_DEAD: the RST came from the sender of this direction */
	PATH_FRAGMENTS = 1 << 10,/* fragments were forwarded, in either direction: no way back to control mode (fragment.h) */
	PATH_IDENTITY = 1 << 11, /* both connections have the same addresses, ports, numbers: only the IP header is rewritten */
	PATH_ECT = 1 << 12,      /* the sender has negotiated ECN: its segments may be marked */
	PATH_ECN = 1 << 13,      /* ... and so has the receiver: marks pass unchanged */
	PATH_TRACE = 1 << 14,    /* segments are traced (trace.h), in control mode, too */
};

/* Updated as one 64-bit word, so that an unsplice stops it at an exact position. */
union path_word {
	__u64 all;
	struct {
		__u32 end;   /* highest sequence end forwarded (in space) */
		__u16 wraps; /* how often `end` wrapped; PATH_TRIGGER: upper half of limit_in, which is less than 2^31 away */
		__u16 flags; /* enum path_flag */
	};
};

/* A path entry: the state of one direction in forwarding mode. */
struct path {
	union path_word word;
	/* The next four are updated as one 64-bit word, too (union path_acked). */
	__u32 max_ack;   /* highest acknowledgement forwarded, in out space of the leg where packets arrive */
	__u16 via;       /* index into vias (VIA_INDEX), VIA_ROOM and VIA_TAP */
	__u8 scales;     /* window scale (shift): low 4 bits on arrival, high 4 bits on departure */
	__u8 seen;       /* time of the last packet, in units of 2^33 ns, CLOCK_MONOTONIC */
	__u32 seq_add, ack_add, tsval_add, tsecr_add; /* added to the fields of each forwarded segment */
	__u16 rport, lport; /* of the leg where packets leave, network order */
	__u32 remote4;      /* the host of that leg if it is IPv4, network order; see PATH_CROSS */
};

struct path4 {
	struct path p;
};

struct path6 {
	struct path p;
	__u32 remote[4]; /* the host of the leg where packets leave, network order, IPv4-mapped */
};

/* A slot of the table of path entries (table.h, place.h): the part that both families share. */
struct slot {
	__u64 hop;   /* of a home: which of its places hold keys of this home, one bit each */
	__u32 state; /* of a place: taken by this generation, or the time at which it became free */
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
	VIA_XDP_FRAGMENTS = 1 << 1, /* ... and frames in several buffers as well */
	VIA_PEER = 1 << 2,          /* deliver to the veth's other end, in another network namespace (bpf_redirect_peer) */
};

/* A next hop and our own address, shared by many flows. */
struct via {
	__u32 ifindex;
	__u32 mtu;      /* largest IP packet, bytes: the MTU of the device, limited by `most` */
	__u8 dmac[6], smac[6];
	__u32 local[4]; /* our address on the outgoing leg; network order, IPv4-mapped */
	enum via_flag flags;
	__u32 most;     /* largest IP packet for the hosts behind this hop, by their MSS and path MTU, bytes */
	__u32 mark;     /* firewall mark of packets that sockets send to this hop: routes are looked up with it */
};

/* A half-open connection of a client, known by its SYN. */
struct embryo {
	__u32 irs, iss;
	__u32 tsval_in, tsval_out;
	__u16 mss_in, mss_out;
	__u8 wscale_in, wscale_out;
	/* LEG_TS, LEG_SACK, OPT_WSCALE, OPT_ECN offered by the host / by us; in: OPT_TRANSPARENT, OPT_END_TO_END, OPT_WAITS, OPT_FULL */
	__u8 opts_in, opts_out;
	__u32 edge_out; /* with OPT_PASSED: what the client acknowledges */
	__u32 ifindex;
	__u8 dmac[6], smac[6];
};
#define OPT_WSCALE 0x80
#define OPT_TRANSPARENT 0x40 /* opts_in: LEG_TRANSPARENT */
#define OPT_END_TO_END 0x08 /* opts_in: LEG_END_TO_END */
#define OPT_WAITS 0x04 /* opts_in: LEG_WAITS */
#define OPT_ECN 0x20

/* Identifies the fragments of one TCP segment as they arrive (RFC 791, 3.2; RFC 8200, 4.5). Network byte order. */
struct train_key {
	__u32 remote[4];
	__u32 local[4];
	__u32 id;
};

/* What the first fragment of a segment says about the later ones. */
struct train {
	__u64 when;     /* ns, CLOCK_MONOTONIC, coarse: when the first fragment arrived */
	__u32 seq;      /* of the segment, host order */
	__u32 id;       /* identification of the forwarded fragments, host order */
	/* ports of the leg where it arrives and of the one where it leaves: all four tell its flow from others; network order */
	__u16 rport, lport;
	__u16 out_rport, out_lport;
	__u8 doff;      /* length of the TCP header, bytes */
	__u8 fin;       /* the segment has a FIN */
	__u8 fill[2];
	__u32 generation; /* of the entry that it was forwarded by */
};

/* ---- events, system-call programs ---- */

enum event_kind {
	EVENT_FORWARDING = 1, /* both directions are being forwarded: user space may commit */
	EVENT_CONTROL = 2,    /* both directions are back in control mode */
	EVENT_TRIGGERED = 3,  /* the data path has begun an unsplice on its own */
	EVENT_CLOSED = 4,     /* both FINs are acknowledged */
	EVENT_RESET = 5,      /* the flow was reset */
	EVENT_OVERSIZE = 6,   /* the sender keeps sending segments that do not fit the next hop's MTU */
	EVENT_LIMIT_REACHED = 7,     /* all bytes up to the limit were forwarded */
	EVENT_DESERTED = 8,   /* a transparent connection's host sends to a socket that is gone */
	EVENT_REPLACED = 9,   /* a new connection takes the place of the leg's, which is over: its entries are removed, but for the
	                       * path entry of a host that may not have got a reset (OTHER_IS_RESET) */
	EVENT_NARROW = 10,    /* the path to this leg's peer takes so little that its host cannot be told (icmp.h): take the flow back */
};

/* How to read tap_record.at. */
enum tap_position {
	TAP_STREAM = 0,   /* stream position */
	TAP_EXTENDED = 1, /* sequence number, with its wraps since the commit in the upper half: add switch_args.origin_a or _b */
	TAP_LOW = 2,      /* sequence number; the limit is less than 2^31 away */
};

/* Precedes each piece of a forwarded segment in the ring `taps`. */
struct tap_record {
	struct tuple leg; /* where the segment arrived */
	__u32 kind;       /* enum tap_position */
	__u64 at;         /* position of the first byte */
	__s32 acked;      /* highest acknowledgement of the other host, relative to `at` */
	__u32 len;        /* bytes that follow */
};

/* Header fields of one copy of a traced segment, host byte order. */
struct trace_copy {
	__u32 seq, ack;
	__u32 len;   /* payload, bytes */
	__u16 win;   /* as in the header, unscaled */
	__u8 flags;  /* flags byte of the TCP header */
	__u8 is;     /* 1 if there is such a copy */
};

/* A traced segment: how it arrived, and the copies of it that left. */
struct trace_record {
	struct tuple leg;  /* where it arrived, or whose socket has sent it */
	__u32 from_socket; /* 1 if the local socket has sent it */
	__u64 when;        /* ns, CLOCK_MONOTONIC */
	__u64 verdicts;    /* one bit per enum verdict: a segment may have several */
	struct trace_copy came, forwarded, local;
};

/* Indices of `tracing`. */
enum trace_word {
	TRACE_UNTIL = 0, /* ns, CLOCK_MONOTONIC: tracing stops at this time; user space keeps moving it on */
	TRACE_LOST = 1,  /* records that were lost because the ring was full */
	TRACE_MAX = 2,
};

/* A leg that is removed since a new connection takes its place. */
struct replaced {
	__u64 end;   /* stream position of all that the host has sent */
	__u32 flags; /* of the record, enum leg_flag; 0: there is none, and `end` is not known */
	__u32 more;  /* 1 if the same event of the flow's other leg follows */
};

struct event {
	struct tuple leg;
	enum event_kind kind;
	__u32 generation; /* of the leg's entry; 0: there is none */
	struct path p;    /* the entry */
	struct replaced replaced; /* EVENT_REPLACED */
};

/* Values of half.limit: up to LIMIT_MAX a number of bytes, otherwise one of the other two. */
enum limit {
	LIMIT_MAX = 0x40000000,  /* the largest number */
	LIMIT_NONE = 0xfffffffe, /* no limit: forward everything */
	LIMIT_KEEP = 0xffffffff, /* forward nothing: the proxy keeps the unread bytes in the socket, and gets all that follow */
};

/* One half of a splice, as user space sees it. Positions are stream positions; a FIN counts as one byte. */
struct half {
	struct tuple leg;
	__u32 consumed;  /* in: bytes read from the socket */
	__u32 produced;  /* in: bytes written to the socket */
	__u32 leftover;  /* in: bytes read from this leg, but not yet written to the other */
	enum limit limit; /* in: OP_FREEZE: how many bytes beyond `consumed` may be forwarded, or LIMIT_NONE, LIMIT_KEEP */
	__u32 pending;   /* out: OP_FREEZE: bytes left to read from the socket; OP_UNSPLICE: 1 if the direction was forwarded */
	__u32 start;     /* out: stream position of the bound, low 32 bits */
	__u32 seq;       /* out: OP_FREEZE: sequence number of the bound */
	__u32 fin;       /* out: OP_FREEZE: the FIN is below the bound, and counted in `pending`; OP_UNSPLICE: it was forwarded */
	__u32 flags;     /* out: enum leg_flag */
	enum phase phase_in; /* out */
};

enum switch_op {
	OP_FREEZE = 1,   /* begin a splice: set the bounds, PHASE_LOCAL -> PHASE_TO_FWD */
	OP_COMMIT = 2,   /* finish a splice: fill the path entries, once both directions are in PHASE_FWD */
	OP_UNSPLICE = 3, /* return to control mode from any phase */
	OP_LOOK = 4,     /* only read phases and positions */
	OP_STOP = 5,     /* stop the path entries of a released flow */
	OP_RESUME = 6,   /* put them into force again */
};

enum switch_result {
	SWITCH_OK = 0,
	SWITCH_UNTRACKED = 1, /* a record or path entry is missing, or the leg is not tracked */
	SWITCH_BUSY = 2,      /* not now: an earlier switch is not over, for instance */
	SWITCH_CLOSING = 3,   /* the flow is closing, or was reset */
	SWITCH_FRAGMENTS = 4, /* fragments were seen */
	SWITCH_MISMATCH = 5,  /* OP_FREEZE: the byte counts cannot be right */
	SWITCH_FULL = 6,      /* OP_COMMIT: a path entry is missing */
	SWITCH_WINDOW = 7,    /* OP_FREEZE with `fit`: a host was promised more than the other has room for */
	SWITCH_SHORT = 8,     /* OP_FREEZE, OP_COMMIT: all bytes up to the limit have arrived already */
	SWITCH_SILENT = 9,    /* OP_FREEZE: a host was silent for so long that its TSval may have gone half round */
	SWITCH_OPTIONS = 10,  /* OP_FREEZE: timestamps or selective acknowledgements were negotiated on one leg only */
	SWITCH_OTHER = 11,    /* the entry or record belongs to another connection by now, or the legs are not a flow */
};

struct switch_args {
	enum switch_op op;
	enum switch_result result;
	__u32 hold;          /* OP_FREEZE: use the hold policy */
	__u32 fit;           /* OP_FREEZE: refuse while a host is promised more than the other can take; OP_STOP: only if idle;
			      * OP_COMMIT: refuse if a message has been forwarded whole */
	__u32 trigger;       /* OP_COMMIT: set the limit to the current position, for a (bit 0), for b (bit 1) */
	__u32 tap;           /* OP_FREEZE: copy forwarded data to user space */
	struct half a, b;
	__u16 via_a, via_b;  /* OP_COMMIT: next hop towards a, b */
	__u32 remote_a, remote_b; /* OP_COMMIT: index into remotes6, if the address families differ */
	__u64 end_a, end_b;  /* out: stream position of max_in of a, b */
	__u64 origin_a, origin_b; /* out: stream position = this + extended sequence number of a, b (TAP_EXTENDED) */
};

/* The next hop to a leg's host, from the leg's record. */
struct hop {
	__u32 ifindex;
	__u32 macs[3]; /* dmac, smac */
	__u32 mss;     /* announced by the host, bytes */
	__u32 mark;
};

/* The argument of switch_flow(). The hops are not in switch_args, because the program copies that to its stack, which is full. */
struct switch_call {
	struct switch_args args;
	struct hop hop_a, hop_b; /* out */
	__u32 generation_a, generation_b; /* in: of the connections that are meant; 0: whichever they are */
};

/* What to do with the path entry of path_args.key; several operations also change the leg's record. */
enum path_op {
	PATH_OP_GET = 1,    /* read the entry, and that of `other` if given */
	PATH_OP_ADD = 2,    /* add an entry, all zero, and the record of a leg that waits for the answer to our SYN */
	PATH_OP_PUT = 3,    /* write the entry as given, new or not */
	PATH_OP_REMOVE = 4, /* remove entry and record, and those of `other` if given */
	PATH_OP_CLEAR = 5,  /* as PATH_OP_REMOVE, but keep those of a live new connection that has reused the port */
	PATH_OP_UNTAP = 6,  /* copy no more data to user space: changes entry and record */
	PATH_OP_NEXT = 7,   /* find the next entry, from slot number `slot` on; `slot` moves past it */
	PATH_OP_UNSEEN = 8, /* segments may have passed unseen: mark the record as not tracked */
	PATH_OP_IDLE = 9,   /* as PATH_OP_NEXT, for entries in control mode; also report from the leg's record */
	PATH_OP_SWEEP = 10, /* as PATH_OP_REMOVE, if it still is as PATH_OP_IDLE reported it, and not in forwarding mode */
	PATH_OP_RETURN = 11, /* as PATH_OP_REMOVE, for legs that were never in a switch: their sockets go on without a record */
	PATH_OP_MOVE = 12,   /* change the next hop of an entry in forwarding mode from p_other.via to p.p.via */
	PATH_OP_STOPPED = 13, /* as PATH_OP_NEXT, for entries that are not in forwarding mode */
	PATH_OP_HOP = 14,     /* write next hop p.p.via to the leg's record, for segments forwarded to its host in a switch */
	PATH_OP_TRACED = 15,   /* set PATH_TRACE */
	PATH_OP_UNTRACED = 16, /* clear PATH_TRACE */
	PATH_OP_DECIDED = 17, /* clear LEG_WAITS of the records of `key` and `other` */
	PATH_OP_DEAD = 18,    /* set PATH_DEAD: what the host still sends is answered with a reset */
};

/* The argument of path_entry(): user space's access to one path entry. */
struct path_args {
	enum path_op op;
	/* 0: done. Otherwise
	 *   PATH_OP_PUT: -1: the table is full
	 *   PATH_OP_GET: 1: no such entry, or none for `other`
	 *   PATH_OP_ADD: 1: the entry exists; 2: `other` has no record; -1: no room; -2: no room, and `other` has given up its
	 *     entry and record, too
	 *   PATH_OP_CLEAR, PATH_OP_SWEEP, PATH_OP_RETURN: bit 0: `key` was kept; bit 1: `other` was kept
	 *   PATH_OP_MOVE, PATH_OP_HOP: 1: nothing was changed
	 *   PATH_OP_NEXT, PATH_OP_IDLE, PATH_OP_STOPPED: 1: none found yet, call again; -1: no more slots */
	__s32 result;
	struct tuple key;
	struct tuple other; /* a second leg, or all zero; PATH_OP_ADD: the client's leg for which the connection is
			     * opened. It must have a record, unless leg_flags has LEG_END_TO_END. */
	__u32 mss;          /* PATH_OP_ADD: out: announced by the host of `other`, bytes; 0: no `other` */
	__u32 leg_flags;    /* PATH_OP_ADD: flags for the record beside LEG_SYN; without a record of `other`, also what our SYN may
			     * offer. PATH_OP_IDLE: out: those of the record, 0: no record */
	/* Of the entries of `key` and `other`. In, except for PATH_OP_GET, PATH_OP_ADD and the walks: the connections that are meant; 0:
	 * whichever they are. An operation on another connection changes nothing; what was to be removed counts as kept. Out: those of
	 * the entries. */
	__u32 generation, other_generation;
	__u32 ifindex;      /* PATH_OP_IDLE: out: of the record */
	__u32 fill;
	__u64 slot;         /* PATH_OP_NEXT, PATH_OP_IDLE, PATH_OP_STOPPED: slot number */
	struct path6 p; /* the entry; `remote` is unused if the key is IPv4 */
	struct path p_other; /* PATH_OP_GET: out: the entry of `other`; PATH_OP_MOVE: `via` is the old next hop */
};

/* A flow that has ended, as path_args describes it. */
struct ended_flow {
	struct tuple key, other;
	__u32 generation, other_generation;
};

/* The argument of clear_ended(): PATH_OP_CLEAR for many flows. */
struct clear_call {
	__u64 flows;  /* address in user space of an array of `count` times struct ended_flow */
	__u32 count;  /* at most CLEAR_FLOWS */
	__u32 fill;
	__u64 kept;   /* out: two bits for each flow, as in path_args.result; the lowest are those of the first flow */
};

enum adopt_op {
	ADOPT_ATTEND = 1, /* make a record of what the socket says, and watch its connection from now on */
	ADOPT_FINISH = 2, /* complete it, at least a grace period later */
};

enum adopt_result {
	ADOPT_OK = 0,
	ADOPT_GONE = 1,    /* there is no such socket */
	ADOPT_BUSY = 2,    /* a process works on it, or a segment has just arrived: try again */
	ADOPT_CLOSING = 3, /* it is being opened, or closed both ways or by others, or was reset */
	ADOPT_FULL = 4,    /* no room for a record */
	ADOPT_KNOWN = 5,   /* the connection has a record already */
	ADOPT_SILENT = 6,  /* ADOPT_FINISH: since ADOPT_ATTEND, no program has seen what goes to the host, or what comes from there */
	ADOPT_FRAGMENTS = 7, /* ADOPT_FINISH: fragments were seen */
	ADOPT_OPTIONS = 8, /* it counts congestion marks as AccECN does, which the other host's segments would not (ecn.h) */
	ADOPT_OTHER = 9,   /* ADOPT_FINISH: the record belongs to another connection by now */
};

/* The argument of adopt(), behind an Ethernet header. */
struct adopt_args {
	struct tuple leg;
	enum adopt_op op;
	enum adopt_result result;
	__u32 generation; /* of the leg's entry; ADOPT_ATTEND: out, ADOPT_FINISH: in */
	__u32 shut;       /* whether the caller has sent its FIN */
	__u64 since;      /* when ADOPT_ATTEND was called, ns, CLOCK_MONOTONIC, coarse; ADOPT_ATTEND: out, ADOPT_FINISH: in */
	/* ADOPT_FINISH: bytes that the caller has read and written: the socket's positions in the streams. Its own FIN counts as one,
	 * the host's does not: the kernel may have passed that with the last bytes, and not told. */
	__u64 consumed, produced;
	__u32 silent; /* ADOPT_FINISH: ms since the host was heard, at least */
	__u32 fill;
};

/* The headers of a segment of a handshake between hosts, which user space passes on. */
struct handshake {
	struct tuple leg; /* where it arrived */
	__u32 generation; /* of that leg's entry; 0: it has none */
	__u32 ifindex;
	__u8 eth[14];
	__u8 fill[2];
	__u8 ip[40];      /* IPv4: 20 bytes, without options */
	__u8 tcp[60];
};

/* Precedes each piece of a held segment in the ring `held`: the segment's headers. IP options are dropped, as in forwarding. */
struct held_record {
	struct tuple leg; /* where the segment arrived */
	__u32 ifindex;
	__u32 at, len;    /* offset of this piece in the payload, and its length, bytes */
	__u32 payload;    /* payload of the whole segment, bytes */
	__u16 segment;    /* super-packet: payload of each of its segments, bytes; otherwise 0 */
	__u8 eth[14];
	__u8 ip[40];      /* IPv4: 20 bytes */
	__u8 tcp[60];
};

/* Indices of `holding`: bytes held for all flows since the process began. */
enum held_bytes {
	HELD_GIVEN = 0, /* given to user space by the data path */
	HELD_BACK = 1,  /* sent on again by user space */
	HELD_MAX = 2,
};

/* Values of `listeners`. */
enum listens {
	LISTENS = 1,
	LISTENS_TRANSPARENT = 2, /* for transparent connections */
	LISTENS_END_TO_END = 3, /* a listening socket whose clients may shake hands with a server */
	LISTENS_WAITS = 4, /* flag, with one of the last two: connections have LEG_WAITS */
};

/* Describes the pinned maps. Written when they are created. */
struct abi {
	__u32 version;   /* ABI_VERSION */
	__u32 layout;    /* fingerprint of the layout of all that is pinned (build.rs) */
	__u64 seed;      /* hash_seed (table.h) */
	__u64 namespace; /* SO_NETNS_COOKIE: the number in the directory's name may have been reused by another namespace */
};

/* A listening address; all zero is any address. Network byte order. */
struct listen_key {
	__u32 local[4];
	__u16 port;
	__u16 family; /* 4 or 6, host order */
};

/* What the data path did with a segment, or why. Each is counted; docs/metrics-and-verdicts.md explains them to users. */
enum verdict {
	V_FORWARDED,        /* forwarded in forwarding mode */
	V_FORWARDED_SLOW,   /* forwarded while the flow was switching */
	V_LOCAL,            /* passed to the local socket */
	V_BOTH,             /* forwarded and passed to the local socket */
	V_LOCAL_OUT,        /* sent by the local socket */
	V_LOCAL_MUTED,      /* sent by the local socket of a forwarded flow: dropped */
	V_HELD,             /* held in user space until the drain is over (hold policy) */
	V_OUT_OF_WINDOW,    /* sequence number not acceptable */
	V_BAD_ACK,          /* acknowledgement not acceptable */
	V_OLD_TIMESTAMP,    /* older timestamp than the SYN's: a duplicate from the host's last connection (PAWS) */
	V_BAD_RST,          /* RST outside of the window, or after the end of the flow */
	V_SYN,              /* SYN on a live flow */
	V_CHALLENGE,        /* answered with a challenge ACK */
	V_CHALLENGE_LIMITED,/* not answered with a challenge ACK: rate limit */
	V_RST,              /* RST relayed */
	V_RESET_AGAIN,      /* of a connection that was reset: answered with an RST */
	V_TTL,              /* hop limit reached zero */
	V_OVERSIZE,         /* larger than the MTU: dropped, and its sender told by ICMP */
	V_FRAGMENT,         /* first fragment in a handshake or a switch, or segment behind an IPv6 extension header */
	V_STRADDLE,         /* part of a segment across the bound was left to retransmission */
	V_NO_PEER,          /* the other leg is gone, or has joined another flow */
	V_REWRITE_FAILED,   /* a kernel helper failed, for want of memory */
	V_TABLE_FULL,       /* no room for a leg or path entry */
	V_STALE_CPU,        /* gave up after racing with other CPUs for one entry */
	V_FORWARDED_EARLY,  /* forwarded by XDP */
	V_ICMP_TRANSLATED,  /* ICMP error about a forwarded segment, translated and passed to its sender */
	V_FRAGMENT_FORWARDED, /* fragment of a spliced flow, forwarded */
	V_FRAGMENT_STRAY,   /* later fragment of a TCP segment whose first fragment was not forwarded: left to the stack */
	V_FRAGMENT_LATE,    /* later fragment of a flow that has left forwarding mode */
	V_FRAGMENT_TINY,    /* first fragment without the whole TCP header */
	V_FRAGMENT_OVERLAP, /* later fragment that overlaps the TCP header or exceeds the size of a datagram */
	V_FRAGMENT_CROSS,   /* fragment that would have to change the address family */
	V_TAPPED,           /* piece of a forwarded segment, copied to user space */
	V_TAP_LOST,         /* piece that was not copied, because the reader is behind; the segment was forwarded anyway */
	V_HANDSHAKE,        /* segment of a handshake between hosts, given to user space */
	V_HANDSHAKE_LOST,   /* ... dropped, because user space is behind: its sender retransmits it */
	V_PASSED_BY,        /* segment between hosts that contradicts a handshake of theirs: routed, since the SYN may be forged */
	V_RST_UNPROVEN,     /* RST not in order: its sender is challenged, and no state changes */
	V_NO_ACK,           /* segment without ACK that is neither SYN nor RST */
	V_BAD_CHECKSUM,     /* wrong TCP checksum */
	V_HOLD_OVERFLOW,    /* to be held, but there was no room: dropped, its sender retransmits it */
	V_BEYOND_LIMIT,     /* beyond the limit while the direction drains: dropped, its sender retransmits it */
	V_CE_DROPPED,       /* CE mark, but the receiver would not echo it: dropped, so that the loss tells the sender */
	V_CUT,              /* larger than the MTU: the part that fits was forwarded */
	V_UNWATCHED,        /* segment of a spliced flow on a device without our programs: dropped (guard.h) */
	V_NO_HOP,           /* the next hop to the other host, or its address, is gone */
	V_NO_RECORD,        /* the flow was released, and is being recreated: dropped, its sender retransmits it */
	V_MAX,
};

#endif
