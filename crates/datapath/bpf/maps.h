/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* All maps, and the types of records that only these programs use. */
#ifndef LONGSPLICE_MAPS_H
#define LONGSPLICE_MAPS_H

#include "flow.h"
#include "mark.h"
#include "place.h"
#include "segment.h"

/* Types that no map refers to: these variables put them into the BTF, from which user space's view is generated. */
const volatile struct event event_layout;
const volatile struct slot4 slot4_layout;
const volatile struct slot6 slot6_layout;
const volatile struct ended_flow ended_flow_layout;
const volatile enum constant constant_layout;
const volatile enum mark mark_layout;
const volatile enum leg_flag leg_flag_layout;
const volatile enum path_flag path_flag_layout;
const volatile struct tap_record tap_record_layout;
const volatile struct handshake handshake_layout;
const volatile struct held_record held_record_layout;
const volatile enum held_bytes held_bytes_layout;
const volatile enum listens listens_layout;
const volatile struct trace_record trace_record_layout;
const volatile struct adopt_args adopt_args_layout;
const volatile enum trace_word trace_word_layout;

#define MAX_LEGS 131072   /* legs in control mode, in a switch or parked; resized before load */
#define MAX_REMOTES 65536 /* flows from IPv4 to IPv6 */
#define MAX_EMBRYOS 65536 /* half-open connections; one that is evicted works, but cannot be spliced */
#define MAX_TRAINS 4096   /* fragmented segments under way: 50 ms at 1 Gbit/s; one that is evicted is retransmitted */
#define MAX_IDENTS 256    /* counters of IP identifications: a single one for all pairs of addresses would wrap too soon */

/* ---- connections ---- */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LEGS);
	__type(key, struct tuple);
	__type(value, struct leg);
} legs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_EMBRYOS);
	__type(key, struct tuple);
	__type(value, struct embryo);
} embryos SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LISTENERS);
	__type(key, struct listen_key);
	__type(value, __u32);
} listeners SEC(".maps");

/* Is there a listener at a port with these low bits, or has there been one? If not, a packet needs no look-up in `listeners`. Not
 * pinned: each process fills its own. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORT_CLASSES);
	__type(key, __u32);
	__type(value, __u32);
} listened_ports SEC(".maps");

/* ---- path entries ---- */

struct table_page {
	__u8 room[SLOTS4 * sizeof(struct slot4) + 64]; /* 64: to align the slots to cache lines */
};

_Static_assert(sizeof(struct slot4) == 64 && sizeof(struct slot6) == 128, "cache lines");
_Static_assert(SLOTS6 * sizeof(struct slot6) <= SLOTS4 * sizeof(struct slot4), "pages of one size");
_Static_assert(sizeof(struct table_page) + 448 <= 32768, "with the map's header in 32 KB");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(max_entries, 1);
		__uint(key_size, sizeof(__u32));
		__uint(value_size, sizeof(struct table_page));
	});
} paths4 SEC(".maps"), paths6 SEC(".maps");

/* Number of path entries in both tables. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} entries SEC(".maps");

/* No program holds a slot that was freed before this time. ns, CLOCK_MONOTONIC. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} unheld SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_VIAS);
	__type(key, __u32);
	__type(value, struct via);
} vias SEC(".maps");

struct remote6 {
	__u32 addr[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_REMOTES);
	__type(key, __u32);
	__type(value, struct remote6);
} remotes6 SEC(".maps");

/* ---- fragments ---- */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_TRAINS);
	__type(key, struct train_key);
	__type(value, struct train);
} fragment_trains SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_IDENTS);
	__type(key, __u32);
	__type(value, __u32);
} idents SEC(".maps");

/* ---- answers of our own ---- */

enum answer {
	ANSWER_CHALLENGE, /* challenge ACK, for a SYN (RFC 5961, 7) */
	ANSWER_TOO_BIG,   /* ICMP (RFC 1812, 4.3.2.8) */
	ANSWER_RESET,     /* RST, for a segment to a socket that is gone (RFC 9293, 3.5.2) */
	ANSWERS,
	ANSWER_NARROW = ANSWERS, /* no answer, but EVENT_NARROW, which has the rate limit of one leg only */
};

/* Tokens for answers of one kind. Each second, a random number of tokens is granted, around a mean. With a fixed number, an
 * attacker could count the remaining answers and so learn how many other connections have caused (CVE-2016-5696). */
struct limiter {
	__u64 second;
	__s64 left;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ANSWERS);
	__type(key, __u32);
	__type(value, struct limiter);
} limiters SEC(".maps");

#define MAX_ANSWERED 8192 /* legs that got an answer recently; one that is evicted may get one answer more */

struct answered_key {
	struct tuple leg;
	enum answer kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_ANSWERED);
	__type(key, struct answered_key);
	__type(value, __u64); /* time, ns, CLOCK_MONOTONIC, coarse; lowest bit: an answer was sent */
} answered SEC(".maps");

/* ---- for user space ---- */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 19); /* about 5000 events; user space polls phases, too, so a lost one only causes a delay */
} events SEC(".maps");

/* Not 0: user space reads `events` at short intervals, so that most events need no wake-up. Not pinned: it is about a process. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} polling SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, V_MAX);
	__type(key, __u32);
	__type(value, __u64);
} verdicts SEC(".maps");

/* Handshake segments of transparent connections, about 1500. A SYN flood can fill this ring, but nothing else. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} handshakes SEC(".maps");

/* Copies of forwarded data (struct tap_record). Not pinned: the ring ends with the process, since a process that takes the
 * flows over does not know the readers. Resized before load. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24);
} taps SEC(".maps");

/* Records of a trace, about 2000: enough for two million segments a second with a reader that wakes up every millisecond. Not
 * pinned. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} traces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TRACE_MAX);
	__type(key, __u32);
	__type(value, __u64);
} tracing SEC(".maps");

/* Held segments (struct held_record). Not pinned, like `taps`. Resized before load. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} held SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HELD_MAX);
	__type(key, __u32);
	__type(value, __u64);
} holding SEC(".maps");

/* Describes the pinned maps to a process that takes them over: version of the layout, seed of the hashes, network namespace. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct abi);
} abi SEC(".maps");

/* ---- devices ---- */

#define MAX_DEVICES 16384 /* limit of `watched`; more devices are not attached to */

/* Devices that our programs are attached to, or whose packets are seen on such a device. The key is the ifindex. guard.h does not
 * examine their packets. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} watched SEC(".maps");

/* ---- per-CPU scratch space ---- */

#define MAX_TCP_HDR 60

/* The scratch record of a CPU. One is enough: programs run with softirqs off, and a nested program (egress of a cloned packet)
 * returns before it touches the record. */
struct scratch {
	struct tuple t;     /* key of the leg where the packet arrived, or whose socket has sent it */
	struct tuple other; /* key of the leg where a forwarded copy leaves */
	struct seg s;
	struct plan p;
	__u32 pkt_len;      /* length of the IP packet, bytes */
	__u8 v6;            /* 1 if the packet is IPv6 */
	__u8 ihl;           /* length of the IP header, with an extension header, bytes */
	__u8 doff;          /* length of the TCP header, bytes */
	__u8 ttl;
	__u8 ts_at, sack_at, sack_len; /* offsets of the options in the TCP header, 0: none; length of the SACK option */
	__u8 cursor;        /* offset of the option that is being parsed */
	__u8 egress;        /* 1 if the packet was sent by a local socket */
	__u8 fragment;      /* 1 for a fragment, or a segment behind an extension header */
	__u8 more;          /* 1 for a fragment other than the last one */
	__u8 transparent;       /* 1 if the leg has LEG_TRANSPARENT */
	__u8 taken;         /* 1 for packets with MARK_TAKEN */
	__u8 end_to_end;    /* 1 if the leg has LEG_END_TO_END */
	__u8 jumbo;         /* 1 if a jumbo header that exists in memory only follows the IPv6 header (parse.h) */
	__u16 frag_at;      /* offset of the fragment in the datagram, bytes */
	__u32 frag_id;      /* identification, network order */
	__u8 l3[40];        /* IP header as it arrived, without options */
	__u8 old[64], new[64]; /* TCP header before and after a rewrite */
	__u8 orig[64];      /* TCP header as it arrived */
	__u8 mac[12];       /* Ethernet addresses as they arrived */
	__u8 hop[12];       /* Ethernet addresses of the forwarded copy */
	__u32 ifindex;      /* outgoing device of the forwarded copy */
	__u32 came;         /* payload as it arrived, bytes */
	__u8 traced;        /* 1 if the path entry has PATH_TRACE */
	__u8 woken;         /* 1 if this segment has woken up the records of its flow */
	__u64 verdicts;     /* verdicts so far, one bit per enum verdict */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

static __always_inline struct scratch *scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

#define SUM_CHUNK 512 /* limit of one bpf_csum_diff() call before Linux 6.13, bytes */

struct sum_chunk {
	__u8 bytes[SUM_CHUNK];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sum_chunk);
} sum_chunks SEC(".maps");

/* Payload of one record in the rings `taps` and `held`, bytes. Powers of two; per-CPU values are limited to 32 KB. */
#define TAP_CHUNK 16384
#define HOLD_CHUNK 16384

/* Buffer for one record. It is needed because bpf_ringbuf_reserve() takes constant sizes only, and the packet decides the
 * length. */
struct tap_chunk {
	struct tap_record head;
	__u8 bytes[TAP_CHUNK];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tap_chunk);
} tap_chunks SEC(".maps");

/* The same for held segments. */
struct hold_chunk {
	struct held_record head;
	__u8 bytes[HOLD_CHUNK];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct hold_chunk);
} hold_chunks SEC(".maps");

/* State of prefetch() in the current batch. */
struct ahead {
	__u64 found; /* homes of later packets that hold keys, so far */
	__u32 left;  /* later packets that were looked at already */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ahead);
} aheads SEC(".maps");

#endif
