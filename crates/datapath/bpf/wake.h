/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Wakes up the records of a flow that was forwarded: their numbers are those of the commit until then. */
#ifndef LONGSPLICE_WAKE_H
#define LONGSPLICE_WAKE_H

#include "record.h"
#include "fast.h"

/* Wake up both records, of which one at least sleeps. Returns ADMITTED, or what becomes of the segment. A global function, so
 * that the verifier checks it once. */
__noinline int wake_up(const struct tuple *t, const struct tuple *other)
{
	struct scratch *sc = scratch();
	struct path *pl, *po;
	struct leg *l, *o;

	if (!sc || !t || !other)
		return TCX_DROP;
	l = bpf_map_lookup_elem(&legs, t);
	o = bpf_map_lookup_elem(&legs, other);
	pl = find_path(t);
	po = find_path(other);
	if (!l || !o || !pl || !po || !is_paired(o, t))
		return drop(V_NO_PEER);
	if (pl->word.flags & PATH_SPLICED)
		return RETRY; /* committed since the entry was read */
	/* A record that is awake may have a peer that is not yet: another processor wakes up both. The numbers of one that sleeps are
	 * those of the commit, and gigabytes may have passed since. */
	if (is_asleep(l, pl) || is_asleep(o, po)) {
		wake_both(l, o, pl, po, bpf_ktime_get_ns());
		sc->woken = 1;
	}
	return ADMITTED;
}

#endif
