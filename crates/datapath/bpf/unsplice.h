/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Unsplice of a flow, given the keys of its legs. */
#ifndef LONGSPLICE_UNSPLICE_H
#define LONGSPLICE_UNSPLICE_H

#include "path.h"
#include "table.h"

/* Copy the next hop to l's host from `in`, the path entry for packets to it: it may have changed in forwarding mode. */
static __always_inline void learn_hop(struct leg *l, const struct path *in)
{
	__u32 via = path_index(in);
	struct via *v = bpf_map_lookup_elem(&vias, &via);

	if (!v || !(l->flags & LEG_SPLICED))
		return;
	l->ifindex = v->ifindex;
	__builtin_memcpy(l->dmac, v->dmac, 12);
}

/* Take both directions back to control mode. Returns 0, or a negative number if a record or path entry is missing, or if the two
 * are not the legs of one flow. */
__noinline int unsplice_legs(const struct tuple *ta, const struct tuple *tb)
{
	struct leg *a, *b;
	struct path *pa, *pb;

	if (!ta || !tb)
		return -1;
	a = bpf_map_lookup_elem(&legs, ta);
	b = bpf_map_lookup_elem(&legs, tb);
	pa = find_path(ta);
	pb = find_path(tb);
	if (!a || !b || !pa || !pb || !is_paired(a, tb) || !is_paired(b, ta))
		return -1;
	learn_hop(a, pb);
	learn_hop(b, pa);
	wake_both(a, b, pa, pb, bpf_ktime_get_ns());
	unsplice_direction(a, b);
	unsplice_direction(b, a);
	return 0;
}

#endif
