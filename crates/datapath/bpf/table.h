/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of path entries: open addressing, one slot per entry, key and path in one cache line (IPv4) or two (IPv6).
 *
 * The hash of a key selects its home. The entry is there or in one of 63 other places, which follow from the home (place.h). The
 * home says which of these places hold keys of its own (slot.hop). So most look-ups read the home only: a hit at home and a miss
 * cost one cache line. There are no chains, and entries never move.
 *
 * A table consists of pages, each of them an array map, and all places of a key are in one page. Arrays of up to 32 KB come from
 * the kernel's direct mapping, whose TLB entries cover megabytes. A larger array is mapped in units of 4 KB, and a random look-up
 * would miss the TLB as well. The verifier inlines both map look-ups of a slot, so they cost a few instructions and no call.
 *
 * Concurrency: an insertion takes a slot by compare-and-swap of its state, fills it, and then makes it visible by one bit at the
 * home. A removal clears that bit, and the one that does so frees the slot. A freed slot is not reused while a program may still
 * hold it: user space waits for that (`unheld`), or else a second has to pass. The same key must not be inserted twice at a time.
 * So the processor that creates the record in `legs`, a hash map, also inserts the entry (track.h). User space does both for the
 * connections that it opens. */
#ifndef LONGSPLICE_TABLE_H
#define LONGSPLICE_TABLE_H

#include "kernel.h"
#include "maps.h"
#include "parse.h"
#include "place.h"
#include "step.h"

/* slot.state of a used slot is its generation, which is odd. Otherwise it is the moment at which the slot was freed, or 0: never
 * used. The generation tells the connections of one four-tuple from each other: ports come back within microseconds. It is the
 * time of the insertion, in units of 2^10 ns, so two of them are the same only if that many of one four-tuple begin a multiple
 * of 37 minutes apart, to the microsecond. */
#define SLOT_TAKEN 1
#define MOMENT 19    /* unit of time: 2^19 ns, half a millisecond; in slot.state always 2 modulo 4, so never 0 or odd */
#define REST 2048u   /* moments, about a second: when a freed slot may be reused in any case */
#define SKEW 64u     /* moments: upper limit of the difference between the clocks of two processors */

/* Set before load: the number of pages of each table, and a random seed, so that hosts cannot choose their slots. */
const volatile __u32 pages4 = 1, pages6 = 1;
const volatile __u64 hash_seed = 0;

/* Convert ns, CLOCK_MONOTONIC, to a moment for slot.state. */
static __always_inline __u32 moment(__u64 now)
{
	return (__u32)(now >> MOMENT) / 4 * 4 + 2;
}

/* For how long a slot must have been free to be reused, in moments, including SKEW. */
static __always_inline __u32 rest(__u64 now)
{
	__u32 zero = 0;
	__u64 *since = bpf_map_lookup_elem(&unheld, &zero);
	__u64 enough = since ? (now - *since) >> MOMENT : REST; /* wraps to a large value if it is in the future */

	return (enough < REST ? enough + 8 : REST) + SKEW; /* 8: both times were rounded */
}

/* Add to the number of entries. */
static __always_inline void count_entries(__u64 more)
{
	__u32 zero = 0;
	__u64 *n = bpf_map_lookup_elem(&entries, &zero);

	if (n)
		__sync_fetch_and_add(n, more);
}

/* The kernel's array map. Its value follows a header, which begins at a page boundary. */
struct bpf_array {
	char value[0];
} __attribute__((preserve_access_index));

/* The home of a key, in terms that fit both tables. */
struct place {
	struct table_page *page;
	__u32 slots, size, home;
};

static __always_inline struct table_page *page_at(void *map, __u32 number)
{
	void *array = bpf_map_lookup_elem(map, &number);
	__u32 first = 0;

	return array ? bpf_map_lookup_elem(array, &first) : NULL;
}

static __always_inline struct place place4(const struct tuple4 *k)
{
	__u64 hash = hash4(hash_seed, k);
	void *page = page_at(&paths4, page_of(hash, pages4));

	return (struct place){ page, SLOTS4, sizeof(struct slot4), home_of(hash, SLOTS4) };
}

static __always_inline struct place place6(const struct tuple *k)
{
	__u64 hash = hash6(hash_seed, k);
	void *page = page_at(&paths6, page_of(hash, pages6));

	return (struct place){ page, SLOTS6, sizeof(struct slot6), home_of(hash, SLOTS6) };
}

/* Return slot number `at` of a page, or NULL if there is none. */
static __always_inline void *slot_at(struct place p, __u32 at)
{
	struct table_page *page = p.page;

	asm volatile("" : "+r"(at)); /* the verifier must see the comparison of the value that is used */
	if (!page || at >= p.slots)
		return NULL;
	asm volatile("" : "+r"(page)); /* Linux before 6.13 refuses arithmetic on a pointer that may be NULL */
	/* Begin at the first cache line. The value is at a multiple of 8, so & 56 loses nothing. It is needed because the
	 * verifier knows no bounds of a negated value before 6.17, and must see that atomic operations are aligned. */
	return page->room + (-bpf_core_field_offset(struct bpf_array, value) & 56) + at * p.size;
}

#define MOST_WORDS (sizeof(struct tuple) / 4)

/* Does the slot hold this key? words: length of the key, in units of 4 bytes. */
static __always_inline int holds(const struct slot *s, const __u32 *key, __u32 words)
{
	__u32 differ = 0, i;

#pragma clang loop unroll(full)
	for (i = 0; i < MOST_WORDS; i++)
		if (i < words)
			differ |= s->key[i] ^ key[i];
	return !differ;
}

/* Return the number of the place that holds the key, in the order of its home (at_way()), or WAYS. hop: the home's. */
static __always_inline __u32 search(struct place p, __u64 hop, const __u32 *key, __u32 words)
{
	struct slot *s;
	__u32 i;

	for (i = 0; i < WAYS && hop >> i; i++) {
		if (!(hop >> i & 1))
			continue;
		s = slot_at(p, at_way(p.home, p.slots, i));
		if (s && holds(s, key, words))
			return i;
	}
	return WAYS;
}

/* Add an entry, its path all zero, for a key that has none. Returns 0, or -1 if there is no free place. */
static __always_inline int insert(struct place p, const __u32 *key, __u32 words, __u32 size)
{
	struct slot *home = slot_at(p, p.home), *s;
	__u64 now = bpf_ktime_get_ns();
	__u32 at = moment(now) + SKEW, least = rest(now), state, i, k;

	if (!home)
		return -1;
	for (i = 0; i < WAYS; i++) {
		s = slot_at(p, at_way(p.home, p.slots, i));
		if (!s)
			continue;
		state = *(volatile __u32 *)&s->state;
		if (state & SLOT_TAKEN || (state && at - state < least))
			continue;
		if (__sync_val_compare_and_swap(&s->state, state, (__u32)(now >> 10) << 1 | SLOT_TAKEN) != state)
			continue;
#pragma clang loop unroll(full)
		for (k = 0; k < MOST_WORDS; k++)
			if (k < words)
				s->key[k] = key[k];
		__builtin_memset(s->key + words, 0, size);
		__sync_fetch_and_or(&home->hop, 1ull << i);
		count_entries(1);
		return 0;
	}
	return -1;
}

/* Remove the entry of a key, if there is one. */
static __always_inline void take_out(struct place p, const __u32 *key, __u32 words)
{
	struct slot *home = slot_at(p, p.home), *s;
	__u32 way;
	__u64 bit;

	if (!home)
		return;
	way = search(p, home->hop, key, words);
	if (way == WAYS)
		return;
	s = slot_at(p, at_way(p.home, p.slots, way));
	bit = 1ull << (way & (WAYS - 1));
	if (s && __sync_fetch_and_and(&home->hop, ~bit) & bit) {
		/* Read the clock after the bit was cleared: no look-up finds the slot from then on. */
		*(volatile __u32 *)&s->state = moment(bpf_ktime_get_ns());
		count_entries(-1);
	}
}

#define WORDS4 (sizeof(struct tuple4) / 4)
#define WORDS6 (sizeof(struct tuple) / 4)

/* The next four are global functions: the verifier walks through their loops once, and not at every call. */

/* Return the number in its page of the slot that holds a key, if not at home, or -1. hop: the home's. */
__noinline int seek4(const struct tuple4 *k, __u64 hop)
{
	struct place p;
	__u32 way;

	if (!k)
		return -1;
	p = place4(k);
	way = search(p, hop & ~1ull, (const __u32 *)k, WORDS4);
	return way == WAYS ? -1 : (int)at_way(p.home, p.slots, way);
}

__noinline int seek6(const struct tuple *k, __u64 hop)
{
	struct place p;
	__u32 way;

	if (!k)
		return -1;
	p = place6(k);
	way = search(p, hop & ~1ull, k->remote, WORDS6);
	return way == WAYS ? -1 : (int)at_way(p.home, p.slots, way);
}

/* Add an entry, all zero, for a leg that has none. Returns 0, or -1 if there is no free place. */
__noinline int insert_path(const struct tuple *t)
{
	if (!t)
		return -1;
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);

		return insert(place4(&k), (const __u32 *)&k, WORDS4, sizeof(struct path4));
	}
	return insert(place6(t), t->remote, WORDS6, sizeof(struct path6));
}

/* Remove the entry of a leg, if there is one. */
__noinline int remove_path(const struct tuple *t)
{
	if (!t)
		return 0;
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);

		take_out(place4(&k), (const __u32 *)&k, WORDS4);
	} else {
		take_out(place6(t), t->remote, WORDS6);
	}
	return 0;
}

/* The look-ups: return the entry of a key, or NULL. */
static __always_inline struct path4 *find4(const struct tuple4 *k)
{
	struct place p = place4(k);
	struct slot4 *s = slot_at(p, p.home);
	__u64 hop;

	if (!s)
		return NULL;
	hop = *(volatile __u64 *)&s->hop;
	if (hop & 1 && holds((struct slot *)s, (const __u32 *)k, WORDS4))
		return &s->p;
	if (!(hop >> 1))
		return NULL;
	s = slot_at(p, seek4(k, hop)); /* NULL for -1, which is beyond any page */
	return s ? &s->p : NULL;
}

static __always_inline struct path6 *find6(const struct tuple *k)
{
	struct place p = place6(k);
	struct slot6 *s = slot_at(p, p.home);
	__u64 hop;

	if (!s)
		return NULL;
	hop = *(volatile __u64 *)&s->hop;
	if (hop & 1 && holds((struct slot *)s, k->remote, WORDS6))
		return &s->p;
	if (!(hop >> 1))
		return NULL;
	s = slot_at(p, seek6(k, hop));
	return s ? &s->p : NULL;
}

static __noinline struct path *find_path(const struct tuple *t)
{
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);
		struct path4 *p = find4(&k);

		return p ? &p->p : NULL;
	}
	struct path6 *p = find6(t);

	return p ? &p->p : NULL;
}

/* Return the generation of a leg's entry, or 0 if there is none. */
static __noinline __u32 generation(const struct tuple *t)
{
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);
		struct path4 *p = find4(&k);

		return p ? *(volatile __u32 *)((void *)p - __builtin_offsetof(struct slot4, p) +
					       __builtin_offsetof(struct slot4, state)) : 0;
	}
	struct path6 *p = find6(t);

	return p ? *(volatile __u32 *)((void *)p - __builtin_offsetof(struct slot6, p) +
				       __builtin_offsetof(struct slot6, state)) : 0;
}

/* Is the leg's connection the one that is meant? meant: its generation, or 0 for any. */
static __always_inline int is_meant(const struct tuple *t, __u32 meant)
{
	return !meant || generation(t) == meant;
}

/* Set sc->other to the leg where packets of `p` leave. remote6: its host, if the entry is IPv6. Returns 0 if the host's
 * address is missing. */
static __always_inline int lead_out(struct scratch *sc, const struct path *p, const __u32 *remote6, const struct via *v)
{
	__u32 remote4 = p->remote4;

	if (remote6) {
		__builtin_memcpy(sc->other.remote, remote6, 16);
	} else if (p->word.flags & PATH_CROSS) {
		struct remote6 *r6 = bpf_map_lookup_elem(&remotes6, &remote4);

		if (!r6)
			return 0;
		__builtin_memcpy(sc->other.remote, r6->addr, 16);
	} else {
		sc->other.remote[0] = sc->other.remote[1] = 0;
		sc->other.remote[2] = MAPPED_PREFIX;
		sc->other.remote[3] = remote4;
	}
	__builtin_memcpy(sc->other.local, v->local, 16);
	sc->other.rport = p->rport;
	sc->other.lport = p->lport;
	return 1;
}

/* Find the path entry of sc->t and its next hop, and set sc->other as lead_out() does. Returns NULL if any of them is missing. */
static __always_inline struct path *way_out(struct scratch *sc, struct via **v)
{
	const __u32 *remote6 = NULL;
	struct path *p;
	__u32 via;

	if (!sc->v6) {
		struct tuple4 k = key4(&sc->t);
		struct path4 *p4 = find4(&k);

		if (!p4)
			return NULL;
		p = &p4->p;
	} else {
		struct path6 *p6 = find6(&sc->t);

		if (!p6)
			return NULL;
		p = &p6->p;
		remote6 = p6->remote;
	}
	via = path_index(p);
	*v = bpf_map_lookup_elem(&vias, &via);
	return *v && lead_out(sc, p, remote6, *v) ? p : NULL;
}

/* Does the packet change its address family? After lead_out(). */
static __always_inline int is_crossed(const struct scratch *sc)
{
	return tuple_is_v4(&sc->other) == !!sc->v6;
}

/* Read the key in slot `number`, counted page by page through paths4 and then paths6. Returns 0, 1 if the slot is free or,
 * with `idle`, its entry is in forwarding mode, and -1 if there is no such slot. */
__noinline int key_of_slot(__u64 number, struct tuple *key, __u32 idle)
{
	__u64 all4 = (__u64)pages4 * SLOTS4;
	struct place p = { NULL, SLOTS4, sizeof(struct slot4) };

	if (!key)
		return -1;
	if (number < all4) {
		struct slot4 *s;

		p.page = page_at(&paths4, number / SLOTS4);
		s = slot_at(p, number % SLOTS4);
		if (!s || !(s->state & SLOT_TAKEN) || (idle && s->p.p.word.flags & PATH_SPLICED))
			return !s ? -1 : 1;
		tuple_from4(key, s->key.remote, s->key.local);
		key->rport = s->key.rport;
		key->lport = s->key.lport;
	} else {
		struct slot6 *s;

		number -= all4;
		p.slots = SLOTS6;
		p.size = sizeof(*s);
		p.page = page_at(&paths6, number / SLOTS6);
		s = slot_at(p, number % SLOTS6);
		if (!s || !(s->state & SLOT_TAKEN) || (idle && s->p.p.word.flags & PATH_SPLICED))
			return !s ? -1 : 1;
		*key = s->key;
	}
	return 0;
}

#endif
