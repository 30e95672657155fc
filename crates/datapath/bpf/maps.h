/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* All maps, and the records that only these programs have in them. */
#ifndef LONGSPLICE_MAPS_H
#define LONGSPLICE_MAPS_H

#include "flow.h"
#include "place.h"
#include "segment.h"

/* Types that no map mentions, for the generated view. */
const volatile struct event event_layout;
const volatile enum constant constant_layout;
const volatile enum leg_flag leg_flag_layout;
const volatile enum path_flag path_flag_layout;
const volatile struct tap_record tap_record_layout;
const volatile struct handshake handshake_layout;
const volatile struct held_record held_record_layout;
const volatile enum held_bytes held_bytes_layout;
const volatile enum listens listens_layout;
const volatile struct trace_record trace_record_layout;
const volatile enum trace_word trace_word_layout;

#define MAX_LEGS 131072   /* legs in control mode, switching or parked; resized before load */
#define MAX_REMOTES 65536 /* flows between IPv4 and IPv6 */
#define MAX_EMBRYOS 65536 /* half-open connections: evicting the oldest costs a splice, not a connection */
#define MAX_TRAINS 4096   /* fragmented segments under way: 50 ms of them at 1 Gbit/s. Evicting one costs a retransmission */
#define MAX_IDENTS 256    /* counters of identifications: one for all pairs of addresses would come round too soon */

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

/* ---- path entries ---- */

struct table_page {
	__u8 room[SLOTS4 * sizeof(struct slot4) + 64]; /* slots are to begin at a cache line */
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

/* How many entries both tables hold. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} entries SEC(".maps");

/* Slots that were left before this have nobody who holds them. ns, CLOCK_MONOTONIC. */
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
	ANSWERS,
};

/* Tokens for all answers of a kind, given anew each second: a number around the mean that nobody can know, or whoever counts what
 * is left could tell what others have used (CVE-2016-5696). */
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

#define MAX_ANSWERED 8192 /* legs that were answered lately. Evicting one costs one more answer */

struct answered_key {
	struct tuple leg;
	enum answer kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_ANSWERED);
	__type(key, struct answered_key);
	__type(value, __u64); /* when, ns, CLOCK_MONOTONIC, coarse; lowest bit: it was answered */
} answered SEC(".maps");

/* ---- for user space ---- */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18); /* some 4000 events: user space polls phases too, so a lost one delays only */
} events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, V_MAX);
	__type(key, __u32);
	__type(value, __u64);
} verdicts SEC(".maps");

/* Handshakes of foreign connections: some 1500. A flood of SYNs fills it, and no more. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} handshakes SEC(".maps");

/* Of the process, and not pinned: whoever takes the flows over does not know the reader. Resized before load. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24);
} taps SEC(".maps");

/* Some 2000 records: what a reader that is woken every millisecond misses at two million segments a second. Of the process, and
 * not pinned. */
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

/* Of the process, and not pinned, as the taps. Resized before load. */
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

/* What a process must know that takes the pinned maps over: whose layout they have, the seed of their hashes,
 * and where they belong. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct abi);
} abi SEC(".maps");

/* ---- devices ---- */

#define MAX_DEVICES 16384 /* that packets may pass unjudged; beyond, no more are attached to */

/* Devices that are attached to, or whose packets are seen on one that is: key is the index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} watched SEC(".maps");

/* ---- room to work, of each CPU ---- */

#define MAX_TCP_HDR 60

/* One per-CPU record: programs run with softirqs off, and a program that runs nested (egress of a cloned packet) returns before
 * it touches the record. */
struct scratch {
	struct tuple t;     /* as the leg sees it: the host is `remote` */
	struct tuple other; /* the leg where a forwarded copy goes out */
	struct seg s;
	struct plan p;
	__u32 pkt_len;      /* IP packet, bytes */
	__u8 v6;            /* family of the packet */
	__u8 ihl;           /* bytes */
	__u8 doff;          /* TCP header, bytes */
	__u8 ttl;
	__u8 ts_at, sack_at, sack_len; /* offsets in the TCP header; 0: none */
	__u8 cursor;
	__u8 egress;
	__u8 fragment;      /* a fragment, or a segment behind an extension header */
	__u8 more;          /* a fragment, and not the last one */
	__u8 foreign;       /* of a leg with LEG_FOREIGN */
	__u16 frag_at;      /* bytes of the datagram before it */
	__u32 frag_id;      /* network order */
	__u8 l3[40];        /* IP header as it came, without options */
	__u8 old[64], new[64]; /* TCP header */
	__u8 orig[64];      /* TCP header as it came */
	__u8 mac[12];       /* Ethernet addresses as they came */
	__u8 hop[12];       /* ... of the forwarded copy */
	__u32 ifindex;      /* its device */
	__u32 came;         /* payload as it came, bytes */
	__u8 traced;        /* PATH_TRACE */
	__u64 verdicts;     /* bits by enum verdict, so far */
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

#define SUM_CHUNK 512 /* what bpf_csum_diff takes at once, before Linux 6.13 */

struct sum_chunk {
	__u8 bytes[SUM_CHUNK];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sum_chunk);
} sum_chunks SEC(".maps");

/* Bytes of one record of the rings, powers of two: per-CPU values are limited to 32 KB. */
#define TAP_CHUNK 16384
#define HOLD_CHUNK 16384

/* Where a record is put together: its length is only known from the packet, and the ring reserves constant ones. */
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

/* The same for what is held. */
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

/* Where prefetch() is. */
struct ahead {
	__u64 found; /* homes of packets behind that hold keys, so far */
	__u32 left;  /* packets behind this one that have been looked at */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ahead);
} aheads SEC(".maps");

#endif
