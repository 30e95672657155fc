/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps, and the counters: every packet that was looked up ends in one verdict. */
#ifndef LONGSPLICE_VERDICT_H
#define LONGSPLICE_VERDICT_H

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

/* What a process must know that takes the pinned maps over: whose layout they have, the seed of their hashes,
 * and where they belong. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct abi);
} abi SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_TRAINS);
	__type(key, struct train_key);
	__type(value, struct train);
} trains SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_IDENTS);
	__type(key, __u32);
	__type(value, __u32);
} idents SEC(".maps");

/* Handshakes of foreign connections: some 1500. A flood of SYNs fills it, and no more. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} handshakes SEC(".maps");

/* What we answer by ourselves. */
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

#define ANSWERS_PER_SECOND 1000 /* on average, of a kind: as Linux's tcp_challenge_ack_limit once was */
#define ANSWER_INTERVAL 500000000ull /* ns between two of a kind for one leg: Linux's tcp_invalid_ratelimit */
#define MAX_ANSWERED 8192       /* legs that were answered lately. Evicting one costs one more answer */

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

/* By itself where there is nothing to trace: the short way, and programs that handle no packet of a leg. */
static __always_inline void count_only(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&verdicts, &verdict);

	if (n)
		(*n)++;
}

_Static_assert(V_MAX <= 64, "a word has a bit for each verdict");

/* ... and notes it for a trace. */
static __always_inline void count(__u32 verdict)
{
	struct scratch *sc = scratch();

	count_only(verdict);
	if (sc)
		sc->verdicts |= 1ull << verdict;
}

static __always_inline int drop(__u32 verdict)
{
	count(verdict);
	return TCX_DROP;
}

static __always_inline void tell(const struct tuple *leg, __u32 kind)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e)
		return;
	e->leg = *leg;
	e->kind = kind;
	bpf_ringbuf_submit(e, 0);
}

/* Has the leg's host had no answer of the kind lately? Of what does not fit user space hears, and finds out if the answers help:
 * every second time they are withheld, for then a part goes on (make_fit()), and a host that does not hear gets further. Global,
 * for the sake of its callers' stacks. */
__noinline int is_due(const struct tuple *leg, __u32 kind)
{
	__u64 now = bpf_ktime_get_coarse_ns(), *last;
	struct answered_key k = {};
	int answer;

	if (!leg)
		return 0;
	k.leg = *leg;
	k.kind = kind;
	last = bpf_map_lookup_elem(&answered, &k);
	/* Without the mark: the clock stands still for a tick, and a time that is one beyond it would be long ago. */
	if (last && now - (*last & ~1ull) < ANSWER_INTERVAL)
		return 0;
	answer = kind != ANSWER_TOO_BIG || !last || !(*last & 1);
	now = (now & ~1ull) | answer;
	bpf_map_update_elem(&answered, &k, &now, BPF_ANY);
	if (kind == ANSWER_TOO_BIG)
		tell(leg, EVENT_OVERSIZE);
	return answer;
}

/* The same, and is there an answer left? */
__noinline int may_answer(const struct tuple *leg, __u32 kind)
{
	struct limiter *l = bpf_map_lookup_elem(&limiters, &kind);
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!l || !is_due(leg, kind))
		return 0;
	if (l->second != now >> 30) {
		l->second = now >> 30;
		l->left = ANSWERS_PER_SECOND / 2 + bpf_get_prandom_u32() % ANSWERS_PER_SECOND;
	}
	return __sync_fetch_and_add(&l->left, -1) > 0;
}

#endif
