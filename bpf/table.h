/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of path entries: open addressing, one slot per entry, key and path in one cache line (IPv4) or two (IPv6).
 *
 * Each key has a home, its hash; the entry lies there or at one of 63 other places that follow from the home (place_of). The
 * home says which of them hold keys of its own (slot.hop), so a look-up reads the home, and mostly nothing else: a hit at
 * home and a miss cost one cache line. There are no chains, and nothing ever moves.
 *
 * Under traffic: a slot is taken by compare-and-swap of its state, filled, and then made visible by one bit at the home.
 * Removal clears that bit, and whoever does gives the slot back; it rests for a second before it is taken again, since
 * programs on other processors may still hold it. Two insertions of one key must not meet: the records of `legs`, a hash of
 * the kernel's, decide who makes an entry (track.h), and user space makes those of its own connections. */
#ifndef LONGSPLICE_TABLE_H
#define LONGSPLICE_TABLE_H

#define WAYS 64     /* at two thirds full all are taken for one key in 10^10 */
#define NEAR 8      /* the first places are neighbours, which the processor fetches ahead; the others lie apart, at a
		       stride of the home's own, so that crowds do not grow */

#define SLOT_TAKEN 1 /* slot.state; otherwise twice the second in which it was left, 0: never used */

/* Set before load: places in each table, and what keeps others from choosing where their connections lie. */
const volatile __u32 slots4 = 1, slots6 = 1;
const volatile __u64 hash_seed = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE); /* begins at a page, so that slots are cache lines */
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct slot4);
} paths4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct slot6);
} paths6 SEC(".maps");

static __always_inline __u64 stir(__u64 h, __u64 more)
{
	h = (h ^ more) * 0x9e3779b97f4a7c15ull;
	return h ^ h >> 32;
}

static __always_inline __u64 hash4(const struct tuple4 *k)
{
	__u64 h = stir(hash_seed, (__u64)k->remote << 32 | k->local);

	return stir(h, (__u64)k->rport << 16 | k->lport);
}

static __always_inline __u64 hash6(const struct tuple *k)
{
	__u64 h = stir(hash_seed, (__u64)k->remote[0] << 32 | k->remote[1]);

	h = stir(h, (__u64)k->remote[2] << 32 | k->remote[3]);
	h = stir(h, (__u64)k->local[0] << 32 | k->local[1]);
	h = stir(h, (__u64)k->local[2] << 32 | k->local[3]);
	return stir(h, (__u64)k->rport << 16 | k->lport);
}

/* What both tables do alike; the map is passed beside, since the verifier must know it. */
struct place {
	__u32 slots, home, stride;
};

static __always_inline struct place place_of(__u64 hash, __u32 slots)
{
	__u32 home = (hash & 0xffffffff) * slots >> 32;
	/* All keys of a home go the same ways. Odd, so that far ways do not meet soon in a table of an even size. */
	__u32 stride = ((home * 0x9e3779b1u >> 16) + NEAR) | 1;

	return (struct place){ slots, home, stride };
}

static __always_inline __u32 at_way(struct place p, __u32 way)
{
	__u64 at = (__u64)p.home + (way < NEAR ? way : (way - NEAR + 1) * p.stride);

	return at < p.slots ? at : at % p.slots;
}

#define MOST_WORDS (sizeof(struct tuple) / 4)

static __always_inline int holds(const struct slot *s, const __u32 *key, __u32 words)
{
	__u32 differ = 0, i;

#pragma clang loop unroll(full)
	for (i = 0; i < MOST_WORDS; i++)
		if (i < words)
			differ |= s->key[i] ^ key[i];
	return !differ;
}

/* The way to a key's slot, or WAYS. */
static __always_inline __u32 search(void *map, struct place p, __u64 hop, const __u32 *key, __u32 words)
{
	struct slot *s;
	__u32 at, i;

	for (i = 0; i < WAYS && hop >> i; i++) {
		if (!(hop >> i & 1))
			continue;
		at = at_way(p, i);
		s = bpf_map_lookup_elem(map, &at);
		if (s && holds(s, key, words))
			return i;
	}
	return WAYS;
}

/* A new entry, its path all zero, for a key that has none. 0, or -1: no place. now: ns, CLOCK_MONOTONIC. */
static __always_inline int insert(void *map, struct place p, const __u32 *key, __u32 words, __u32 size, __u64 now)
{
	__u32 second = now >> 30, at = p.home, state, i, k;
	struct slot *home = bpf_map_lookup_elem(map, &at), *s;

	if (!home)
		return -1;
	for (i = 0; i < WAYS; i++) {
		at = at_way(p, i);
		s = bpf_map_lookup_elem(map, &at);
		if (!s)
			continue;
		state = *(volatile __u32 *)&s->state;
		if (state == SLOT_TAKEN || (state && second - (state >> 1) < 2))
			continue;
		if (__sync_val_compare_and_swap(&s->state, state, SLOT_TAKEN) != state)
			continue;
#pragma clang loop unroll(full)
		for (k = 0; k < MOST_WORDS; k++)
			if (k < words)
				s->key[k] = key[k];
		__builtin_memset(s->key + words, 0, size);
		__sync_fetch_and_or(&home->hop, 1ull << i);
		return 0;
	}
	return -1;
}

static __always_inline void take_out(void *map, struct place p, const __u32 *key, __u32 words, __u64 now)
{
	__u32 at = p.home, way;
	__u64 bit;
	struct slot *home = bpf_map_lookup_elem(map, &at), *s;

	if (!home)
		return;
	way = search(map, p, home->hop, key, words);
	if (way == WAYS)
		return;
	at = at_way(p, way);
	s = bpf_map_lookup_elem(map, &at);
	bit = 1ull << (way & (WAYS - 1));
	if (s && __sync_fetch_and_and(&home->hop, ~bit) & bit)
		*(volatile __u32 *)&s->state = (__u32)(now >> 30) << 1;
}

static __always_inline struct tuple4 key4(const struct tuple *t)
{
	return (struct tuple4){ t->remote[3], t->local[3], t->rport, t->lport };
}

#define WORDS4 (sizeof(struct tuple4) / 4)
#define WORDS6 (sizeof(struct tuple) / 4)

/* Global functions: the verifier walks their loops once, and not wherever they are called. */

/* The slot of a key that does not lie at home, or -1. */
__noinline int seek4(const struct tuple4 *k, __u64 hop)
{
	struct place p;
	__u32 way;

	if (!k)
		return -1;
	p = place_of(hash4(k), slots4);
	way = search(&paths4, p, hop & ~1ull, (const __u32 *)k, WORDS4);
	return way == WAYS ? -1 : (int)at_way(p, way);
}

__noinline int seek6(const struct tuple *k, __u64 hop)
{
	struct place p;
	__u32 way;

	if (!k)
		return -1;
	p = place_of(hash6(k), slots6);
	way = search(&paths6, p, hop & ~1ull, k->remote, WORDS6);
	return way == WAYS ? -1 : (int)at_way(p, way);
}

__noinline int insert_path(const struct tuple *t, __u64 now)
{
	if (!t)
		return -1;
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);

		return insert(&paths4, place_of(hash4(&k), slots4), (const __u32 *)&k, WORDS4, sizeof(struct path4), now);
	}
	return insert(&paths6, place_of(hash6(t), slots6), t->remote, WORDS6, sizeof(struct path6), now);
}

__noinline int remove_path(const struct tuple *t, __u64 now)
{
	if (!t)
		return 0;
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);

		take_out(&paths4, place_of(hash4(&k), slots4), (const __u32 *)&k, WORDS4, now);
	} else {
		take_out(&paths6, place_of(hash6(t), slots6), t->remote, WORDS6, now);
	}
	return 0;
}

static __always_inline struct path4 *find4(const struct tuple4 *k)
{
	__u32 at = place_of(hash4(k), slots4).home;
	__u64 hop;
	struct slot4 *s = bpf_map_lookup_elem(&paths4, &at);

	if (!s)
		return NULL;
	hop = *(volatile __u64 *)&s->hop;
	if (hop & 1 && holds((struct slot *)s, (const __u32 *)k, WORDS4))
		return &s->p;
	if (!(hop >> 1))
		return NULL;
	at = seek4(k, hop);
	s = bpf_map_lookup_elem(&paths4, &at);
	return s ? &s->p : NULL;
}

static __always_inline struct path6 *find6(const struct tuple *k)
{
	__u32 at = place_of(hash6(k), slots6).home;
	__u64 hop;
	struct slot6 *s = bpf_map_lookup_elem(&paths6, &at);

	if (!s)
		return NULL;
	hop = *(volatile __u64 *)&s->hop;
	if (hop & 1 && holds((struct slot *)s, k->remote, WORDS6))
		return &s->p;
	if (!(hop >> 1))
		return NULL;
	at = seek6(k, hop);
	s = bpf_map_lookup_elem(&paths6, &at); /* -1 is beyond any table */
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

#endif
