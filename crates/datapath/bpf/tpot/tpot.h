/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translucent proxying (TPOT): the layout that tpot.bpf.c shares with user space, and the wire format of the option.
 *
 * Words: the *asker* is the host or proxy whose SYN carries the option, the *taker* the proxy that intercepts it. Everything
 * after the SYN travels between the two in a tunnel: IP in IP or IP in UDP, the outer addresses are their own, the inner ones are
 * those of the connection. Either may be the host of a leg of ours: the taker's client, or the asker's server.
 */
#ifndef LONGSPLICE_TPOT_H
#define LONGSPLICE_TPOT_H

#include "flow.h"

/* The TCP option, all in network byte order. In a SYN it asks; in a SYN-ACK, which is tunnelled, it is the taker's answer.
 *
 *    0        1        2        3        4        5        6        7
 *   +--------+--------+--------+--------+--------+--------+--------+--------+
 *   |  253   | length |      ExID       |version |  hops  |  capabilities   |
 *   +--------+--------+--------+--------+--------+--------+--------+--------+
 *   |               MAC, in the SYN-ACK of a taker that has a key           |
 *   +--------+--------+--------+--------+--------+--------+--------+--------+
 *
 * hops: how many proxies may still intercept. capabilities: enum tpot_capability; a receiver ignores other bits. The taker's
 * address is the source of the tunnelled SYN-ACK, which fits both families. An option of another length or version counts as
 * none. */
struct tpot_option {
	__u8 kind;   /* TPOT_KIND */
	__u8 length; /* 8, or 16 with a MAC */
	__u16 exid;  /* RFC 6994 */
	__u8 version;
	__u8 hops;
	__u16 capabilities;
};

/* The option with a MAC: SipHash-2-4 of struct tpot_covered. */
struct tpot_answer {
	struct tpot_option option;
	__u64 mac; /* little-endian, as the hash defines it */
};

/* What the MAC covers, in network byte order, IPv4 as ::ffff:a.b.c.d. The ISN of the SYN makes it good for one connection. */
struct tpot_covered {
	struct tpot_option option; /* of the SYN-ACK */
	__u32 asker[4], server[4]; /* of the connection */
	__u32 taker[4];            /* its end of the tunnel */
	__u16 asker_port, server_port;
	__u32 isn;                 /* of the SYN */
};

enum tpot_constant {
	TPOT_KIND = 253,     /* experimental (RFC 4727) */
	TPOT_VERSION = 1,
	TPOT_UDP_PORT = 6080, /* destination of tunnels in UDP: that of GUE, whose variant 1 is an IP packet in UDP */
	TPOT_RULES = 64,     /* rules; each SYN is compared with all */
	TPOT_PLACES = 2 * TPOT_RULES, /* of rules and their sockets: a process takes those that the one before it has not */
	TPOT_DOORS = 4096,   /* addresses at which a single connection is awaited; beyond, user space awaits none */
	TPOT_DOOR = 255,     /* in place of the index of a rule: the connection is awaited */
	TPOT_KNOWN = 4096,   /* destinations of which something is known; the oldest one makes room */
	TPOT_KNOWN_FOR = 3600, /* seconds: then the path may be another one */
	TPOT_AVOID_FOR = 10, /* seconds at first, doubled each time up to TPOT_KNOWN_FOR: two SYNs are lost for many reasons */
	TPOT_ADDRESSES = 4096, /* addresses and devices of this machine */
	TPOT_SYNS = 65536,   /* half-open connections; the oldest one makes room */
	TPOT_PENDING = 65536, /* times of SYNs for our listeners: as many as half-open connections, so that few share one */
	TPOT_PENDING_FOR = 300, /* seconds: longer than Linux repeats a SYN-ACK, with net.ipv4.tcp_synack_retries up to 7 */
	TPOT_TUNNELS = 65536, /* connections in tunnels; beyond, SYNs are left alone */
	TPOT_MEMBERS = 64,   /* members of a router's farm, both families together: a slot has one byte for its member */
	TPOT_SLOTS = 16384,  /* parts of a farm's SYNs, for each family: some 256 for each member, which are shared to about 6 % */
	TPOT_KEYS = 4,       /* keys: two while one replaces the other, of two operators. A forged answer is hashed with each */
};

enum tpot_role {
	TPOT_ASKER = 1,
	TPOT_TAKER = 2,
	TPOT_PLAIN = 3, /* the proxy of a host that does not ask: there is no tunnel, and no entry after the handshake */
};

enum tpot_rule_kind {
	TPOT_RULE_ASK = 1,   /* ask for a proxy: connections of this host to these destinations */
	TPOT_RULE_TAKE = 2,  /* intercept: connections of others to these destinations, with the listener of the rule's index */
	TPOT_RULE_TRUST = 3, /* proxies that may intercept: the taker's address */
	TPOT_RULE_PLAIN = 4, /* as TPOT_RULE_TAKE, but whether they ask or not */
};

/* Bits of the option, host byte order. */
enum tpot_capability {
	TPOT_CAN_UDP = 1 << 0,  /* SYN: the tunnel may be in UDP. SYN-ACK: it is */
	TPOT_WANT_UDP = 1 << 1, /* SYN: and it should be. Otherwise, a taker answers in UDP if its first answer has failed */
};

/* When tunnels of new connections are in UDP, for paths that drop IP in IP. */
enum tpot_udp {
	TPOT_UDP_NEVER = 0,    /* an asker does not offer it, and a taker does not answer in it */
	TPOT_UDP_FALLBACK = 1, /* if the first answer does not arrive, and then at once for this destination */
	TPOT_UDP_ALWAYS = 2,   /* if the taker allows it */
};

/* What an asker has learned about a destination. */
enum tpot_knowledge {
	TPOT_BARE = 1,   /* it has only answered SYNs without the option: it is not asked about */
	TPOT_IN_UDP = 2, /* a taker's answer has only arrived in UDP */
};

/* When a taker connects to the server. */
enum tpot_handshake {
	TPOT_BASIC = 0,     /* after its handshake with the asker */
	TPOT_PIPELINED = 1, /* on the asker's SYN, which is answered at once */
	TPOT_CONFIRM = 2,   /* on the asker's SYN, which is held until the server has answered */
};

struct tpot_rule {
	__u32 net[4], mask[4]; /* network byte order, IPv4 as ::ffff:a.b.c.d */
	__u16 low, high;       /* ports, host byte order; not for TPOT_RULE_TRUST */
	__u8 kind;             /* enum tpot_rule_kind; 0: none */
	__u8 handshake;        /* enum tpot_handshake; for TPOT_RULE_TAKE and TPOT_RULE_PLAIN */
	__u8 fill[2];
};

/* What user space hears of an asker whose connection has no socket yet. */
struct tpot_asking {
	struct handshake segment; /* the SYN as our listener gets it, with the MSS that fits the tunnel; `over`: only `leg` */
	__u32 isn;                /* of the SYN, host byte order */
	__u8 hops;                /* of the SYN */
	__u8 listener;            /* index of the rule */
	__u8 over;                /* the asker has another answer, or does not ask any more */
	__u8 fill;
};

/* What user space configures. */
struct tpot_config {
	__u32 rules;   /* number of rules (0: nothing is asked for or intercepted), and << 16 the index of the first one: read as one */
	__u16 exid;    /* host byte order */
	__u8 hops;     /* of SYNs of this host */
	__u8 udp;      /* enum tpot_udp */
	__u64 cgroup;  /* only its processes ask, and those of cgroups below; 0: all */
	__u32 level;   /* of the cgroup: its distance from the root */
	__u32 keys;    /* number of keys; 0: answers are neither signed nor checked */
	__u64 key[TPOT_KEYS][2]; /* little-endian. A taker signs with the first one, an asker accepts each */
};

/* A destination, by its address, of which something is known. */
struct tpot_known {
	__u64 at;   /* since when, ns, CLOCK_MONOTONIC */
	__u32 what; /* enum tpot_knowledge */
	__u32 lasts; /* seconds from then on. Later, it is only the measure of the next time */
};

/* An address of this machine, which is never intercepted. Network byte order, IPv4 as ::ffff:a.b.c.d. */
struct tpot_address {
	__u32 words[4];
};

/* Our addresses on a device, for the tunnels of SYNs that arrive there; zero: none. */
struct tpot_own {
	__u32 v4[4], v6[4];
};

/* A half-open connection. */
struct tpot_syn {
	__u32 seq;       /* of the SYN, host byte order */
	__u32 iss;       /* taker, plain: of our SYN-ACK; asker: of the server's own answer */
	__u32 peer[4], own[4]; /* taker: the ends of the tunnel */
	__u8 role;       /* enum tpot_role */
	__u8 asked;      /* asker: SYNs sent with the option */
	__u8 answered;   /* taker, plain: our SYN-ACK was sent, `iss` is valid; asker: the server itself has answered, or sent a SYN */
	__u8 hops;       /* of the SYN; plain: those of a host that would ask here */
	__u8 bare;       /* asker: a SYN without the option was sent, because nobody had answered the others */
	__u8 listener;   /* taker, plain: index of the rule and of its socket */
	__u8 udp;        /* of the SYN, with asker those before as well: enum tpot_capability */
	__u8 given;      /* taker, plain: our listener has got the SYN; plain: 2 if the client has completed the handshake */
};

enum tpot_tunnel_flag {
	TPOT_FIN_IN = 1 << 0, /* the peer has sent a FIN, or somebody in its name */
	TPOT_FIN_OUT = 1 << 1,
	TPOT_RST = 1 << 2,    /* likewise */
	TPOT_COOKIE = 1 << 3, /* taker: our SYN-ACK was a SYN cookie, so there may be no socket yet */
	TPOT_UDP = 1 << 4,    /* the tunnel is in UDP */
	TPOT_FIN_IN_ACKED = 1 << 5,  /* whoever has received it has acknowledged exactly that */
	TPOT_FIN_OUT_ACKED = 1 << 6,
	TPOT_RST_EXACT = 1 << 7, /* with the number that was acknowledged last, or ours */
	TPOT_CHOSEN = 1 << 8, /* asker: the socket has acknowledged the taker's answer, not one of the server that came with it */
	TPOT_OUTSIDE = 1 << 9, /* taker: the asker sends outside of the tunnel, or was asked there whether it knows the connection */
};

/* A connection in a tunnel; the key is struct tuple as the inner packets have it. */
struct tpot_tunnel {
	__u32 peer[4], own[4]; /* outer addresses */
	__u32 ifindex;         /* where the peer's last packet arrived */
	__u32 flags;           /* enum tpot_tunnel_flag */
	__u64 seen;            /* ns, CLOCK_MONOTONIC, coarse: the last packet, to the second */
	__u8 role;             /* enum tpot_role */
	__u8 hops;             /* taker: of the SYN */
	__u8 listener;         /* taker: as in struct tpot_syn */
	__u8 fill;
	__u32 ack;             /* the acknowledgement number sent last, host byte order */
	__u32 isn;             /* taker: of the SYN, host byte order */
	__u32 fin_in, fin_out; /* with TPOT_FIN_IN, TPOT_FIN_OUT: the number behind the FIN */
	__u32 fill2;
};

/* The farm of a router: proxies in a network of their own, to which it sends SYNs. */
struct tpot_farm {
	__u32 ifindex; /* of the router's device in that network; 0: it is gone */
	__u32 fill;
	__u64 key[2];  /* of the hash that distributes SYNs, random: nobody can aim at a member */
};

/* What a router did with a SYN that it has forwarded. */
enum tpot_router_verdict {
	R_CHOSEN = 0, /* SYN with the option sent to a member */
	R_RETURNED,   /* SYN with the option from the farm routed: of a member, or one that it does not want */
	R_LEFT,       /* SYN with the option routed: no rule, or no hops left */
	R_NO_MEMBER,  /* SYN with the option routed: no member of its family is up, or is a neighbour */
	R_NO_RETURN,  /* SYN with the option routed: its source is in the farm's network, is our own, or cannot be reached from there */
	R_UNASKED,    /* SYN without the option routed */
	R_MAX,
};

/* What was done with a packet. */
enum tpot_verdict {
	T_ASKED = 0,      /* SYN with the option sent */
	T_NOT_ASKED,      /* retransmitted SYN sent without the option: nobody has answered the ones with it */
	T_AVOIDED,        /* SYN to a destination that has only answered SYNs without the option of late */
	T_NO_SPACE,       /* SYN without space for the option */
	T_INTERCEPTED,    /* SYN with the option given to our listener, or held */
	T_LEFT,           /* SYN with the option routed on: no rule, or no hops left; any SYN of our own, in a loop */
	T_UNSERVED,       /* SYN that a rule is about routed on: no listener, no address or no room */
	T_HELD,           /* SYN with the option kept from our listener until the server answers */
	T_ADMITTED,       /* the same SYN given to our listener */
	T_UNREPORTED,     /* SYN with the option of which user space does not hear, since the ring is full. One to be held is dropped */
	T_UNANSWERED,     /* SYN with the option that comes again, since our listener has not answered the first one: routed on */
	T_UNASKED,        /* SYN without the option from another host: left alone */
	T_INTERCEPTED_PLAIN, /* SYN of a host that need not ask given to our listener, or held */
	T_GIVEN_UP,       /* SYN that gets past us, or to another listener, when it comes again: our socket is ended */
	T_CHALLENGED,     /* SYN without the option for a live connection in a tunnel: answered by an ACK on the way that it came */
	T_PASSED_BY,      /* packet outside of any tunnel, past our connection with the same addresses, half-open or over: routed on */
	T_OPENED,         /* connection enters its tunnel */
	T_OPENED_UDP,     /* the same, in UDP; counted as opened as well */
	T_SECOND_ANSWER,  /* second answer to a SYN, a SYN-ACK or the server's own SYN: answered with an RST on the way that it came */
	T_FORGOTTEN,      /* tunnelled packet of a connection that this proxy does not know any more: answered with an RST */
	T_UNTRUSTED,      /* answer of a proxy that may not intercept: dropped */
	T_UNAUTHENTICATED, /* answer without a MAC that one of our keys has made: dropped */
	T_ENCAPSULATED,
	T_DECAPSULATED,
	T_PLAIN,          /* packet of the asker outside of the tunnel: accepted */
	T_PLAIN_REFUSED,  /* packet to the asker outside of its tunnel: dropped */
	T_UNPROVEN,       /* tunnelled packet of no connection, or from another outer address: left to the stack */
	T_TOO_BIG,        /* ICMP error about a tunnelled packet: translated for the connection */
	T_CE_DROPPED,     /* congestion mark on the tunnel of a packet that cannot bear it (RFC 6040) */
	T_FAILED,         /* a helper of the kernel has failed: dropped */
	T_MAX,
};

#endif
