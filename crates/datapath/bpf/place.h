/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which slots of the table a key may take (table.h): arithmetic only, so that tests can use it, too (model.c). */
#ifndef LONGSPLICE_PLACE_H
#define LONGSPLICE_PLACE_H

#include "flow.h"

#define WAYS 64     /* places of a key: in a table filled to its limit, not one in 10^8 keys finds all of them taken */
#define NEAR 8      /* the first places are neighbours, which the processor prefetches; the others are scattered, in an order
		       that depends on the home, so that full regions do not grow */

/* Slots of a page: prime numbers, so that no two of the scattered places are the same. */
#define SLOTS4 503
#define SLOTS6 251

/* Mix `more` into a hash. */
static __always_inline __u64 stir(__u64 h, __u64 more)
{
	h = (h ^ more) * 0x9e3779b97f4a7c15ull;
	return h ^ h >> 32;
}

/* Hash a key. The ports are mixed in at least twice: hosts use consecutive ports, and their multiples form a lattice, which
 * may fill some pages more than others. */
static __always_inline __u64 hash4(__u64 seed, const struct tuple4 *k)
{
	__u32 ports = (__u32)k->rport << 16 | k->lport;
	__u64 h = stir(seed, (__u64)k->remote << 32 | (k->local ^ ports));

	return stir(h, ports);
}

static __always_inline __u64 hash6(__u64 seed, const struct tuple *k)
{
	__u32 ports = (__u32)k->rport << 16 | k->lport;
	__u64 h = stir(seed, (__u64)k->remote[0] << 32 | (k->remote[1] ^ ports));

	h = stir(h, (__u64)k->remote[2] << 32 | k->remote[3]);
	h = stir(h, (__u64)k->local[0] << 32 | k->local[1]);
	h = stir(h, (__u64)k->local[2] << 32 | k->local[3]);
	return stir(h, ports);
}

/* The page of a hash. */
static __always_inline __u32 page_of(__u64 hash, __u32 pages)
{
	return (hash & 0xffffffff) * pages >> 32;
}

/* The home of a hash: a slot of its page. */
static __always_inline __u32 home_of(__u64 hash, __u32 slots)
{
	return (hash >> 32) * slots >> 32;
}

/* Return place number `way` of a home. The order is the same for all keys of the home. The scattered places form a quadratic
 * sequence: with equal steps, those of some homes would be a few runs of neighbours, which fill up together. Modulo a prime,
 * k * (k + own) differs for all k, since the sum of any two of them and `own` is less than the prime. */
static __always_inline __u32 at_way(__u32 home, __u32 slots, __u32 way)
{
	__u32 at = home + way;

	if (way >= NEAR) {
		__u32 k = way - NEAR + 1, own = (home * 0x9e3779b1u >> 16) % (slots - 2 * (WAYS - NEAR) - 1) + 1;

		at = home + 101 * k * (k + own);
	}
	return at < slots ? at : at % slots;
}

/* The IPv4 key of a tuple. */
static __always_inline struct tuple4 key4(const struct tuple *t)
{
	return (struct tuple4){ t->remote[3], t->local[3], t->rport, t->lport };
}

#endif
