/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of path entries: open addressing, one slot per entry, key and path in one cache line (IPv4) or two (IPv6).
 *
 * Each key has a home, its hash; the entry lies there or at one of 31 other places that follow from the home (place_of). The
 * home says which of them hold keys of its own (slot.hop), so a look-up reads the home, and mostly nothing else: a hit at
 * home and a miss cost one cache line. There are no chains, and nothing ever moves.
 *
 * Under traffic: a slot is taken by compare-and-swap of its state, filled, and then made visible by one bit at the home.
 * Removal clears that bit, and whoever does gives the slot back; it rests for a second before it is taken again, since
 * programs on other processors may still hold it. Two insertions of one key must not meet: the records of `legs`, a hash of
 * the kernel's, decide who makes an entry (track.h), and user space makes those of its own connections. */
#ifndef LONGSPLICE_TABLE_H
#define LONGSPLICE_TABLE_H

#define WAYS 32     /* at two thirds full all are taken for one key in a million */
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

/* What both tables do alike: a map, its size, and a key as words. Inlined, so that all of these are constants. */
struct table {
	void *map;
	__u32 slots, home, stride;
	const __u32 *key;
	__u32 words;
};

static __always_inline __u32 place_of(const struct table *t, __u32 way)
{
	__u64 at = (__u64)t->home + (way < NEAR ? way : (way - NEAR + 1) * t->stride);

	return at < t->slots ? at : at % t->slots;
}

#define MOST_WORDS (sizeof(struct tuple) / 4)

static __always_inline int holds(const struct slot *s, const struct table *t)
{
	__u32 differ = 0, i;

#pragma clang loop unroll(full)
	for (i = 0; i < MOST_WORDS; i++)
		if (i < t->words)
			differ |= s->key[i] ^ t->key[i];
	return !differ;
}

/* The slot of a key, or NULL; its home and its way from there. */
static __always_inline struct slot *search(const struct table *t, struct slot **home, __u32 *way)
{
	struct slot *s = bpf_map_lookup_elem(t->map, &t->home);
	__u32 hop, at, i;

	*home = s;
	*way = 0;
	if (!s)
		return NULL;
	hop = *(volatile __u32 *)&s->hop;
	if (hop & 1 && holds(s, t))
		return s;
	for (i = 1; i < WAYS && hop >> i; i++) {
		if (!(hop >> i & 1))
			continue;
		at = place_of(t, i);
		s = bpf_map_lookup_elem(t->map, &at);
		*way = i;
		if (s && holds(s, t))
			return s;
	}
	return NULL;
}

/* A new entry, its path all zero, for a key that has none. 0, or -1: no place. now: ns, CLOCK_MONOTONIC. */
static __always_inline int insert(const struct table *t, __u32 size, __u64 now)
{
	struct slot *home = bpf_map_lookup_elem(t->map, &t->home), *s;
	__u32 second = now >> 30, at, state, i, k;

	if (!home)
		return -1;
	for (i = 0; i < WAYS; i++) {
		at = place_of(t, i);
		s = bpf_map_lookup_elem(t->map, &at);
		if (!s)
			continue;
		state = *(volatile __u32 *)&s->state;
		if (state == SLOT_TAKEN || (state && second - (state >> 1) < 2))
			continue;
		if (__sync_val_compare_and_swap(&s->state, state, SLOT_TAKEN) != state)
			continue;
#pragma clang loop unroll(full)
		for (k = 0; k < MOST_WORDS; k++)
			if (k < t->words)
				s->key[k] = t->key[k];
		__builtin_memset((__u64 *)s + (t->words + 3) / 2, 0, size);
		__sync_fetch_and_or(&home->hop, 1u << i);
		return 0;
	}
	return -1;
}

static __always_inline void take_out(const struct table *t, __u64 now)
{
	struct slot *home, *s;
	__u32 way, bit;

	s = search(t, &home, &way);
	bit = 1u << (way & 31);
	if (s && home && __sync_fetch_and_and(&home->hop, ~bit) & bit)
		*(volatile __u32 *)&s->state = (__u32)(now >> 30) << 1;
}

static __always_inline struct table table_of(void *map, __u32 slots, __u64 hash, const void *key, __u32 size)
{
	__u32 home = (hash & 0xffffffff) * slots >> 32;
	__u32 stride = (home * 0x9e3779b1u >> 16) + NEAR; /* of the home, which speaks of ways and not of keys */

	return (struct table){ map, slots, home, stride, key, size / 4 };
}

static __always_inline struct table table4(const struct tuple4 *k)
{
	return table_of(&paths4, slots4, hash4(k), k, sizeof(*k));
}

static __always_inline struct table table6(const struct tuple *k)
{
	return table_of(&paths6, slots6, hash6(k), k, sizeof(*k));
}

static __always_inline struct path4 *find4(const struct tuple4 *k)
{
	struct table t = table4(k);
	struct slot *home;
	struct slot4 *s;
	__u32 way;

	s = (void *)search(&t, &home, &way);
	return s ? &s->p : NULL;
}

static __always_inline struct path6 *find6(const struct tuple *k)
{
	struct table t = table6(k);
	struct slot *home;
	struct slot6 *s;
	__u32 way;

	s = (void *)search(&t, &home, &way);
	return s ? &s->p : NULL;
}

static __always_inline struct tuple4 key4(const struct tuple *t)
{
	return (struct tuple4){ t->remote[3], t->local[3], t->rport, t->lport };
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

static __noinline int insert_path(const struct tuple *t, __u64 now)
{
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);
		struct table at = table4(&k);

		return insert(&at, sizeof(struct path4), now);
	}
	struct table at = table6(t);

	return insert(&at, sizeof(struct path6), now);
}

static __noinline int remove_path(const struct tuple *t, __u64 now)
{
	if (tuple_is_v4(t)) {
		struct tuple4 k = key4(t);
		struct table at = table4(&k);

		take_out(&at, now);
	} else {
		struct table at = table6(t);

		take_out(&at, now);
	}
	return 0;
}

#endif
