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
	__u64 enough = since ? *since < now ? (now - *since) >> MOMENT : 0 : REST; /* it may be newer than `now` */

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

/* The home of a key, in terms that fit both tables. number: of the page. */
struct place {
	struct table_page *page;
	__u32 slots, size, home, number;
};

/* Page and home in one number, as an argument. */
static __always_inline __u64 where(struct place p)
{
	return (__u64)p.number << 32 | p.home;
}

static __always_inline struct table_page *page_at(void *map, __u32 number)
{
	void *array = bpf_map_lookup_elem(map, &number);
	__u32 first = 0;

	return array ? bpf_map_lookup_elem(array, &first) : NULL;
}

static __always_inline struct place place4(const struct tuple4 *k)
{
	__u64 hash = hash4(hash_seed, k);
	__u32 number = page_of(hash, pages4);

	return (struct place){ page_at(&paths4, number), SLOTS4, sizeof(struct slot4), home_of(hash, SLOTS4), number };
}

static __always_inline struct place place6(const struct tuple *k)
{
	__u64 hash = hash6(hash_seed, k);
	__u32 number = page_of(hash, pages6);

	return (struct place){ page_at(&paths6, number), SLOTS6, sizeof(struct slot6), home_of(hash, SLOTS6), number };
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

/* Take place number `way` of a home for a key, if it is free. least: rest(now). Returns 1 if it was. */
static __always_inline int take(struct place p, __u32 way, const __u32 *key, __u32 words, __u32 size, __u64 now, __u32 least)
{
	struct slot *s = slot_at(p, at_way(p.home, p.slots, way));
	__u32 state, k;

	if (!s)
		return 0;
	state = *(volatile __u32 *)&s->state;
	if (state & SLOT_TAKEN || (state && moment(now) + SKEW - state < least))
		return 0;
	if (__sync_val_compare_and_swap(&s->state, state, (__u32)(now >> 10) << 1 | SLOT_TAKEN) != state)
		return 0;
#pragma clang loop unroll(full)
	for (k = 0; k < MOST_WORDS; k++)
		if (k < words)
			s->key[k] = key[k];
	__builtin_memset(s->key + words, 0, size);
	return 1;
}

#define WORDS4 (sizeof(struct tuple4) / 4)
#define WORDS6 (sizeof(struct tuple) / 4)

/* What is done with one of the 64 places of a key, and the search of all of them, are global functions: the verifier walks
 * through each once, and not at every call. where: as of where(). is_at4() and is_at6() return the number of the slot if it holds
 * the key, or -1; take4() and take6() are take(). */

__noinline int is_at4(const struct tuple4 *k, __u64 where, __u32 way)
{
	struct place p = { page_at(&paths4, where >> 32), SLOTS4, sizeof(struct slot4) };
	__u32 at = at_way((__u32)where, SLOTS4, way);
	struct slot *s = slot_at(p, at);

	return k && s && holds(s, (const __u32 *)k, WORDS4) ? (int)at : -1;
}

__noinline int is_at6(const struct tuple *k, __u64 where, __u32 way)
{
	struct place p = { page_at(&paths6, where >> 32), SLOTS6, sizeof(struct slot6) };
	__u32 at = at_way((__u32)where, SLOTS6, way);
	struct slot *s = slot_at(p, at);

	return k && s && holds(s, k->remote, WORDS6) ? (int)at : -1;
}

__noinline int take4(const struct tuple4 *k, __u64 where, __u32 way, __u64 now, __u32 least)
{
	struct place p = { page_at(&paths4, where >> 32), SLOTS4, sizeof(struct slot4), where };

	return k && take(p, way, (const __u32 *)k, WORDS4, sizeof(struct path4), now, least);
}

__noinline int take6(const struct tuple *k, __u64 where, __u32 way, __u64 now, __u32 least)
{
	struct place p = { page_at(&paths6, where >> 32), SLOTS6, sizeof(struct slot6), where };

	return k && take(p, way, k->remote, WORDS6, sizeof(struct path6), now, least);
}

#define WAY_SHIFT 16

/* Return the number in its page of the slot that holds a key, and WAY_SHIFT bits further left which place of the key it is, or
 * -1. hop: the home's, of which only the places that are set are searched. The verifier walks through bpf_for() once, and through
 * the other loop, which costs no calls, eight times. */
__noinline int seek4(const struct tuple4 *k, __u64 where, __u64 hop)
{
	__u32 way;
	int at, far;

	for (way = 0; way < NEAR && hop >> way; way++) {
		if (!(hop >> way & 1))
			continue;
		at = is_at4(k, where, way);
		if (at >= 0)
			return way << WAY_SHIFT | at;
	}
	if (!(hop >> NEAR))
		return -1;
	bpf_for(far, NEAR, WAYS) {
		if (!(hop >> far & 1))
			continue;
		at = is_at4(k, where, far);
		if (at >= 0)
			return far << WAY_SHIFT | at;
	}
	return -1;
}

__noinline int seek6(const struct tuple *k, __u64 where, __u64 hop)
{
	__u32 way;
	int at, far;

	for (way = 0; way < NEAR && hop >> way; way++) {
		if (!(hop >> way & 1))
			continue;
		at = is_at6(k, where, way);
		if (at >= 0)
			return way << WAY_SHIFT | at;
	}
	if (!(hop >> NEAR))
		return -1;
	bpf_for(far, NEAR, WAYS) {
		if (!(hop >> far & 1))
			continue;
		at = is_at6(k, where, far);
		if (at >= 0)
			return far << WAY_SHIFT | at;
	}
	return -1;
}

/* Return the slot that seek4() or seek6() has found, or NULL. */
static __always_inline void *slot_found(struct place p, int found)
{
	return slot_at(p, found & ((1u << WAY_SHIFT) - 1)); /* -1 is beyond any page */
}

/* Make a slot visible that was taken for a key. */
static __always_inline void show(struct slot *home, __u32 way)
{
	__sync_fetch_and_or(&home->hop, 1ull << way);
	count_entries(1);
}

/* Add an entry, all zero, for a leg that has none. Returns 0, or -1 if there is no free place. */
__noinline int insert_path(const struct tuple *t)
{
	__u64 now = bpf_ktime_get_ns();
	struct tuple4 k;
	struct slot *home;
	struct place p;
	__u32 way, least = rest(now);

	if (!t)
		return -1;
	k = key4(t);
	p = tuple_is_v4(t) ? place4(&k) : place6(t);
	home = slot_at(p, p.home);
	if (!home)
		return -1;
	for (way = 0; way < WAYS; way++) {
		if (p.slots == SLOTS4 ? take4(&k, where(p), way, now, least) : take6(t, where(p), way, now, least)) {
			show(home, way);
			return 0;
		}
	}
	return -1;
}

/* Remove an entry that was found. */
static __always_inline void take_out(struct place p, struct slot *home, int found)
{
	struct slot *s = slot_found(p, found);
	__u64 bit = 1ull << (found >> WAY_SHIFT & (WAYS - 1));

	if (s && __sync_fetch_and_and(&home->hop, ~bit) & bit) {
		/* Read the clock after the bit was cleared: no look-up finds the slot from then on. */
		*(volatile __u32 *)&s->state = moment(bpf_ktime_get_ns());
		count_entries(-1);
	}
}

/* Remove the entry of a leg, if there is one. */
__noinline int remove_path(const struct tuple *t)
{
	struct slot *home;
	struct place p;

	if (!t)
		return 0;
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);

		p = place4(&k);
		home = slot_at(p, p.home);
		if (home)
			take_out(p, home, seek4(&k, where(p), home->hop));
	} else {
		p = place6(t);
		home = slot_at(p, p.home);
		if (home)
			take_out(p, home, seek6(t, where(p), home->hop));
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
	s = slot_found(p, seek4(k, where(p), hop & ~1ull));
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
	s = slot_found(p, seek6(k, where(p), hop & ~1ull));
	return s ? &s->p : NULL;
}

/* Return where the entry of a leg is, page << 32 | slot, or -1. A global function: the verifier would walk through the whole
 * search at each of its calls. */
__noinline __s64 seat_of(const struct tuple *t)
{
	struct slot *home;
	struct place p;
	int found = -1;

	if (!t)
		return -1;
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);

		p = place4(&k);
		home = slot_at(p, p.home);
		if (home)
			found = seek4(&k, where(p), *(volatile __u64 *)&home->hop);
	} else {
		p = place6(t);
		home = slot_at(p, p.home);
		if (home)
			found = seek6(t, where(p), *(volatile __u64 *)&home->hop);
	}
	return found < 0 ? -1 : (__s64)p.number << 32 | (found & ((1u << WAY_SHIFT) - 1));
}

static __always_inline struct slot4 *seat4(__s64 seat)
{
	return slot_at((struct place){ page_at(&paths4, seat >> 32), SLOTS4, sizeof(struct slot4) }, seat);
}

static __always_inline struct slot6 *seat6(__s64 seat)
{
	return slot_at((struct place){ page_at(&paths6, seat >> 32), SLOTS6, sizeof(struct slot6) }, seat);
}

/* Return the entry of a leg, and the generation of its connection, or NULL and 0. */
static __always_inline struct path *entry_of(const struct tuple *t, __u32 *generation)
{
	__s64 seat = seat_of(t);

	*generation = 0;
	if (tuple_is_v4(t)) {
		struct slot4 *s = seat4(seat);

		if (!s)
			return NULL;
		*generation = *(volatile __u32 *)&s->state;
		return &s->p.p;
	}
	struct slot6 *s = seat6(seat);

	if (!s)
		return NULL;
	*generation = *(volatile __u32 *)&s->state;
	return &s->p.p;
}

static __always_inline struct path *find_path(const struct tuple *t)
{
	__u32 generation;

	return entry_of(t, &generation);
}

/* Return the generation of a leg's entry, or 0 if there is none. */
static __always_inline __u32 generation(const struct tuple *t)
{
	__u32 generation;

	entry_of(t, &generation);
	return generation;
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
	__s64 seat = seat_of(&sc->t);
	struct path *p;
	__u32 via;

	if (!sc->v6) {
		struct slot4 *s = seat4(seat);

		if (!s)
			return NULL;
		p = &s->p.p;
	} else {
		struct slot6 *s = seat6(seat);

		if (!s)
			return NULL;
		p = &s->p.p;
		remote6 = s->p.remote;
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
