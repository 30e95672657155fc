/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Where in the table the entry of a key lies (table.h): arithmetic only, which a test counts with, too (model.c). */
#ifndef LONGSPLICE_PLACE_H
#define LONGSPLICE_PLACE_H

#include "flow.h"

#define WAYS 64     /* in a table as full as it may be, none in 10^8 keys finds all of them taken */
#define NEAR 8      /* the first places are neighbours, which the processor fetches ahead; the others lie apart, in an order
		       of the home's own, so that crowds do not grow */

/* Slots of a page: prime, so that no two of the places that lie apart are the same. */
#define SLOTS4 503
#define SLOTS6 251

static __always_inline __u64 stir(__u64 h, __u64 more)
{
	h = (h ^ more) * 0x9e3779b97f4a7c15ull;
	return h ^ h >> 32;
}

/* Ports are stirred twice at least: hosts take them in turn, and products of numbers in turn fall into a lattice, which may fill
 * some pages more than others. */
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

static __always_inline __u32 page_of(__u64 hash, __u32 pages)
{
	return (hash & 0xffffffff) * pages >> 32;
}

static __always_inline __u32 home_of(__u64 hash, __u32 slots)
{
	return (hash >> 32) * slots >> 32;
}

/* Of all keys of a home alike. A quadratic order: with equal steps, some homes' places would be a few runs of neighbours, and
 * full at once. k (k + own) differs for all k, modulo a prime, while the sum of two of them and `own` is less than it. */
static __always_inline __u32 at_way(__u32 home, __u32 slots, __u32 way)
{
	__u32 at = home + way;

	if (way >= NEAR) {
		__u32 k = way - NEAR + 1, own = (home * 0x9e3779b1u >> 16) % (slots - 2 * (WAYS - NEAR) - 1) + 1;

		at = home + 101 * k * (k + own);
	}
	return at < slots ? at : at % slots;
}

static __always_inline struct tuple4 key4(const struct tuple *t)
{
	return (struct tuple4){ t->remote[3], t->local[3], t->rport, t->lport };
}

#endif
