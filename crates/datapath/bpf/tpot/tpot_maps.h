/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translucent proxying: the maps, and the counters. */
#ifndef LONGSPLICE_TPOT_MAPS_H
#define LONGSPLICE_TPOT_MAPS_H

#include "tpot_match.h"

const volatile enum tpot_role role_layout;
const volatile enum tpot_handshake handshake_layout;
const volatile enum tpot_tunnel_flag flag_layout;
const volatile enum tpot_udp udp_layout;
const volatile enum tpot_knowledge knowledge_layout;
const volatile enum tpot_verdict verdict_layout;
const volatile struct tpot_asking asking_layout;

#define SECOND 1000000000ull

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TPOT_SYNS);
	__type(key, struct tuple);
	__type(value, struct tpot_syn);
} tpot_syns SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, TPOT_TUNNELS);
	__type(key, struct tuple);
	__type(value, struct tpot_tunnel);
} tpot_tunnels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TPOT_ADDRESSES);
	__type(key, __u32);
	__type(value, struct tpot_own);
} tpot_own SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TPOT_ADDRESSES);
	__type(key, struct tpot_address);
	__type(value, __u32);
} tpot_addresses SEC(".maps");

/* An answer that is signed or checked. */
struct signing {
	struct tpot_answer answer;
	struct tpot_covered covered;
	__u64 mac; /* as it should be */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct signing);
} tpot_signing SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TPOT_KNOWN);
	__type(key, struct tpot_address);
	__type(value, struct tpot_known);
} tpot_known SEC(".maps");

/* The listening sockets for intercepted connections, by the index of their rule. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, TPOT_PLACES);
	__type(key, __u32);
	__type(value, __u64);
} tpot_listeners SEC(".maps");

/* Listening sockets that await a connection of one host at an address that is not ours, by the tuple of that connection with a
 * zero for the host's port. The kernel removes the entry with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, TPOT_DOORS);
	__type(key, struct tuple);
	__type(value, __u64);
} tpot_doors SEC(".maps");

/* The entry of a connection that enters its tunnel, which would take a large part of the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tpot_tunnel);
} tpot_fresh SEC(".maps");

/* When a SYN was given to a listener of ours, in seconds, by the hash of its tuple. Until TPOT_PENDING_FOR later, a socket may
 * have the addresses of two hosts that do not know of it. Unlike tpot_syns, it cannot be made to forget one by a flood. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TPOT_PENDING);
	__type(key, __u32);
	__type(value, __u32);
} tpot_pending SEC(".maps");

/* Segments that user space hears of (struct tpot_asking). Not pinned: the connections that they are about end with the process.
 * It holds some 1400. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} askings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, T_MAX);
	__type(key, __u32);
	__type(value, __u64);
} tpot_verdicts SEC(".maps");

static __always_inline void count(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&tpot_verdicts, &verdict);

	if (n)
		(*n)++;
}

static __always_inline int drop(__u32 verdict)
{
	count(verdict);
	return TCX_DROP;
}

static __always_inline __u64 now(void)
{
	return bpf_ktime_get_coarse_ns();
}

/* Is the connection of this SYN awaited? Not inlined, to spare the caller's stack. */
__noinline int is_awaited(const struct tuple *t)
{
	struct bpf_sock *sk;
	struct tuple at;

	if (!t)
		return 0;
	at = *t;
	at.rport = 0;
	sk = bpf_map_lookup_elem(&tpot_doors, &at);
	if (!sk)
		return 0;
	bpf_sk_release(sk);
	return 1;
}

/* Remember something about a destination. Not inlined, to spare the caller's stack. */
__noinline int learn(const struct tpot_address *destination, __u32 what)
{
	struct tpot_known known = { .at = now(), .what = what, .lasts = TPOT_KNOWN_FOR }, *before;

	if (!destination)
		return 0;
	before = bpf_map_lookup_elem(&tpot_known, destination);
	if (what == TPOT_BARE) {
		known.lasts = TPOT_AVOID_FOR;
		if (before && before->what == TPOT_BARE) {
			__u64 age = known.at - before->at;

			if (age < before->lasts * SECOND) /* of a connection that has asked before that: nothing new */
				return 0;
			if (age < (before->lasts + TPOT_KNOWN_FOR) * SECOND)
				known.lasts = before->lasts < TPOT_KNOWN_FOR / 2 ? before->lasts * 2 : TPOT_KNOWN_FOR;
		}
	}
	return bpf_map_update_elem(&tpot_known, destination, &known, BPF_ANY);
}

/* The destination, or a proxy for it, has answered a SYN with the option: forget that it has not. */
__noinline int forget(const struct tpot_address *destination)
{
	struct tpot_known *known = destination ? bpf_map_lookup_elem(&tpot_known, destination) : NULL;

	return known && known->what == TPOT_BARE && bpf_map_delete_elem(&tpot_known, destination);
}

/* What is known about a destination: enum tpot_knowledge; 0: nothing. */
static __always_inline __u32 known_about(const __u32 *destination)
{
	struct tpot_known *known = bpf_map_lookup_elem(&tpot_known, destination);

	return known && now() - known->at < known->lasts * SECOND ? known->what : 0;
}

/* A hash of the tuple that need not be secret. */
static __always_inline __u32 mix(const struct tuple *t)
{
	__u32 words = t->remote[0] ^ t->remote[1] ^ t->remote[2] ^ t->remote[3] ^ t->local[0] ^ t->local[1] ^ t->local[2] ^
		      t->local[3] ^ (t->rport << 16 | t->lport);

	return words * 0x9e3779b1u;
}

/* When a SYN of this tuple, or of another one with its hash, was given to a listener. NULL: never, arrays have all entries. */
static __always_inline __u32 *pending(const struct tuple *t)
{
	__u32 at = mix(t) >> 16;

	return bpf_map_lookup_elem(&tpot_pending, &at);
}

static __always_inline __u32 seconds(void)
{
	return now() / SECOND;
}

/* Note that a socket with this tuple may be there from now on. */
static __always_inline void expect_socket(const struct tuple *t)
{
	__u32 *at = pending(t);

	if (at)
		*at = seconds();
}

#endif
