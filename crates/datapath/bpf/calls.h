/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs that user space calls: switch_flow() for the switches of a flow, path_entry() for access to single path
 * entries. */
#ifndef LONGSPLICE_CALLS_H
#define LONGSPLICE_CALLS_H

#include "hold.h"
#include "unsplice.h"
#include "verdict.h"

/* Return PATH_CROSS if packets that arrive on `in` as IPv4 leave on `out` as IPv6: the entry then holds an index instead of the
 * address. Otherwise 0. */
static __always_inline __u32 crosses(const struct tuple *in, const struct tuple *out)
{
	return tuple_is_v4(in) && !tuple_is_v4(out) ? PATH_CROSS : 0;
}

/* Write the address of the outgoing leg's host into the entry of `in`. index: where to put it in remotes6, if the entry
 * crosses. */
static __always_inline void set_remote(const struct tuple *in, const struct tuple *out, __u32 index)
{
	__s64 seat = seat_of(in);

	if (!tuple_is_v4(in)) {
		struct slot6 *s = seat6(seat);

		if (s)
			__builtin_memcpy(s->p.remote, out->remote, 16);
		return;
	}
	struct slot4 *s = seat4(seat);

	if (!s)
		return;
	if (crosses(in, out)) {
		struct remote6 *r = bpf_map_lookup_elem(&remotes6, &index);

		if (r)
			__builtin_memcpy(r->addr, out->remote, 16);
		s->p.p.remote4 = index;
	} else {
		s->p.p.remote4 = out->remote[3];
	}
}

/* The next functions have stack frames of their own, so that they do not add up: switch_flow() has its arguments on the stack,
 * too. */
static __noinline int freeze_both(struct switch_args *g, struct leg *a, struct leg *b)
{
	return freeze(g, a, b, bpf_ktime_get_ns());
}

static __noinline int set_remotes(const struct switch_args *g)
{
	set_remote(&g->a.leg, &g->b.leg, g->remote_b);
	set_remote(&g->b.leg, &g->a.leg, g->remote_a);
	return 0;
}

static __noinline int commit(struct switch_args *g, struct leg *a, struct leg *b, struct path *pa, struct path *pb)
{
	if (!pa || !pb)
		return SWITCH_FULL;
	commit_legs(g, a, b, pa, pb, crosses(&g->a.leg, &g->b.leg), crosses(&g->b.leg, &g->a.leg));
	return SWITCH_OK;
}

/* Stop or resume a released flow, which has path entries only. With `fit`, it is stopped only if it is idle: everything
 * forwarded is acknowledged. While it is stopped, its segments are dropped, until user space has recreated sockets and records
 * or resumes the flow. Every acknowledgement that was forwarded is recorded in the entries (advance_ack()). */
static __always_inline int stop_released(const struct switch_args *g)
{
	struct path *a = find_path(&g->a.leg), *b = find_path(&g->b.leg);
	int result = SWITCH_BUSY;

	if (!a || !b)
		return SWITCH_UNTRACKED;
	if (g->op == OP_STOP) {
		if ((a->word.flags | b->word.flags) & (PATH_FIN | PATH_DEAD))
			return SWITCH_CLOSING;
		stop_path(a);
		stop_path(b);
		if ((a->word.flags | b->word.flags) & PATH_FRAGMENTS)
			result = SWITCH_FRAGMENTS;
		else if (!g->fit || (a->word.end + a->seq_add == b->max_ack &&
				     b->word.end + b->seq_add == a->max_ack))
			return SWITCH_OK;
	}
	__sync_fetch_and_or(&a->word.all, (__u64)PATH_SPLICED << 48);
	__sync_fetch_and_or(&b->word.all, (__u64)PATH_SPLICED << 48);
	return g->op == OP_STOP ? result : SWITCH_OK;
}

/* Copy the next hop from a leg's record. */
static __always_inline void tell_hop(struct hop *h, const struct leg *l)
{
	const __u32 *macs = (const __u32 *)l->dmac; /* and smac */

	h->ifindex = l->ifindex;
	h->macs[0] = macs[0];
	h->macs[1] = macs[1];
	h->macs[2] = macs[2];
	h->mss = l->mss_in;
	h->mark = l->mark;
}

/* Are these the legs that are meant? A port may have been reused for a new connection, and an HTTP leg may have joined another
 * flow: that one must not be switched. */
static __noinline int are_meant(const struct switch_args *g, __u32 a, __u32 b)
{
	return is_meant(&g->a.leg, a) && is_meant(&g->b.leg, b);
}

static __always_inline int is_flow(const struct switch_args *g, const struct leg *a, const struct leg *b)
{
	return is_paired(a, &g->b.leg) && is_paired(b, &g->a.leg);
}

/* Run a switch_op on a flow. */
SEC("syscall")
int switch_flow(struct switch_call *ctx)
{
	struct switch_args args = ctx->args, *g = &args;
	struct leg *a = bpf_map_lookup_elem(&legs, &g->a.leg), *b = bpf_map_lookup_elem(&legs, &g->b.leg);

	g->result = SWITCH_UNTRACKED;
	if (!are_meant(g, ctx->generation_a, ctx->generation_b)) {
		g->result = SWITCH_OTHER;
	} else if (g->op == OP_STOP || g->op == OP_RESUME) {
		g->result = stop_released(g);
	} else if (a && b && (g->op == OP_COMMIT || g->op == OP_UNSPLICE) && !is_flow(g, a, b)) {
		g->result = SWITCH_OTHER;
	} else if (a && b) {
		switch (g->op) {
		case OP_FREEZE:
			g->result = freeze_both(g, a, b);
			break;
		case OP_COMMIT:
			g->result = may_commit(g, a, b);
			if (g->result)
				break;
			set_remotes(g);
			g->result = commit(g, a, b, find_path(&g->a.leg), find_path(&g->b.leg));
			break;
		case OP_UNSPLICE:
			g->result = unsplice_legs(&g->a.leg, &g->b.leg) ? SWITCH_UNTRACKED : SWITCH_OK;
			was_bypassed(&g->a, a);
			was_bypassed(&g->b, b);
			break;
		case OP_LOOK:
			g->result = SWITCH_OK;
			break;
		case OP_STOP:
		case OP_RESUME:
			break;
		}
		read_positions(&g->a, &g->end_a, &g->origin_a, a, find_path(&g->a.leg));
		read_positions(&g->b, &g->end_b, &g->origin_b, b, find_path(&g->b.leg));
		tell_hop(&ctx->hop_a, a);
		tell_hop(&ctx->hop_b, b);
	}
	ctx->args = args;
	return 0;
}

/* Can the socket go on without the leg's record? It can if the leg was never in a switch: host and socket use the same
 * numbers. It cannot if the socket was recreated, since the host may be ahead of it (may_be_behind()). Nor if the hosts shook
 * hands with each other: the socket's clock is late. Nor if an address of ours is none: no segment would find the socket. */
static __always_inline int is_spare(const struct leg *l)
{
	return !(l->flags & (LEG_PAIRED | LEG_RESTORED | LEG_END_TO_END | LEG_TRANSPARENT));
}

/* May the kernel still send to the host, perhaps for a socket that is closed already? The host would not understand it without
 * the record's numbers. Once there is no socket any more, the sweeper removes the record. */
static __always_inline int is_closing(const struct leg *l)
{
	const __u32 over = LEG_FIN_OUT | LEG_FIN_ACKED;

	return !untouched(l) && !(l->flags & (LEG_RESET | LEG_SPLICED)) && (l->flags & over) != over;
}

/* May the operation remove entry and record of `t`? */
static __noinline int may_go(const struct path_args *args, const struct tuple *t)
{
	struct leg *l = bpf_map_lookup_elem(&legs, t);
	struct path *p = find_path(t);

	if (args->op == PATH_OP_REMOVE)
		return 1;
	if (p && p->word.flags & PATH_SPLICED)
		return args->op == PATH_OP_CLEAR && p->word.flags & (PATH_DEAD | PATH_FIN_ACKED);
	if (args->op == PATH_OP_CLEAR && l && is_closing(l))
		return 0;
	if (args->op == PATH_OP_CLEAR) /* the last condition: committed, but the entry is gone already */
		return !l || l->flags & (LEG_RESET | LEG_FIN_IN | LEG_FIN_OUT) || (!p && l->flags & LEG_SPLICED);
	if (args->op == PATH_OP_RETURN)
		return !l || is_spare(l);
	return !l == !args->leg_flags;
}

/* Remove entry and record. */
static __noinline int forget(const struct tuple *t)
{
	remove_path(t);
	return bpf_map_delete_elem(&legs, t);
}

/* Remove entry and record if may_go() agrees. Returns 1 if they were kept. meant: the connection's generation, or 0 for any. If
 * the port was reused for a new connection meanwhile, that one keeps its own. */
static __noinline int forget_if_may(const struct path_args *args, const struct tuple *t, __u32 meant)
{
	if (!is_meant(t, meant) || !may_go(args, t))
		return 1;
	forget(t);
	return 0;
}

/* The same for the entries of `key` and, if given, `other`. Returns path_args.result. */
static __always_inline int forget_flow(const struct path_args *args)
{
	int kept = forget_if_may(args, &args->key, args->generation);

	if (args->other.lport)
		kept |= forget_if_may(args, &args->other, args->other_generation) << 1;
	return kept;
}

/* Add the record of a connection that user space is about to open. Its SYN offers only what the client has negotiated. */
static __noinline int await_answer(const struct path_args *args, const struct leg *client, __u64 now)
{
	struct leg l = { .flags = LEG_SYN | args->leg_flags, .peer = args->other, .seen = now };

	if (client)
		l.flags |= client->flags & (LEG_TS | LEG_SACK);
	return bpf_map_update_elem(&legs, &args->key, &l, BPF_ANY);
}

/* Add record and path entry, for the client's leg `other` if that is given. If there is no room, the client's leg gives up its
 * own: it cannot be spliced without a server's leg, and others can use the room. Returns path_args.result. */
static __noinline int add(struct path_args *args)
{
	struct leg *client = bpf_map_lookup_elem(&legs, &args->other);
	__u64 now = bpf_ktime_get_ns();

	if (args->other.lport && !client && !(args->leg_flags & LEG_END_TO_END))
		return 2;
	args->mss = client ? client->mss_in : 0;
	if (!insert_path(&args->key)) {
		if (!await_answer(args, client, now))
			return 0;
		forget(&args->key);
	}
	count_only(V_TABLE_FULL);
	if (!client || !is_spare(client))
		return -1;
	forget(&args->other);
	return -2;
}

/* Stop copying data to user space: the process that read the copies is gone. */
static __noinline int untap(const struct tuple *t)
{
	struct leg *l = bpf_map_lookup_elem(&legs, t);
	struct path *p = find_path(t);

	if (l)
		__sync_fetch_and_and(&l->flags, ~LEG_TAP);
	if (p)
		__sync_fetch_and_and((__u64 *)&p->max_ack, ~((__u64)VIA_TAP << 32));
	return 0;
}

/* Hold no more data of the host. */
static __noinline int decided(const struct tuple *t)
{
	struct leg *l = bpf_map_lookup_elem(&legs, t);

	if (l)
		wait_no_more(l);
	return 0;
}

/* Set or clear a flag of the entry. */
static __noinline int set_flag(const struct path_args *args)
{
	__u64 flag = (__u64)(args->op == PATH_OP_DEAD ? PATH_DEAD : PATH_TRACE) << 48;
	struct path *p = find_path(&args->key);

	if (p && args->op == PATH_OP_UNTRACED)
		__sync_fetch_and_and(&p->word.all, ~flag);
	else if (p)
		__sync_fetch_and_or(&p->word.all, flag);
	return 0;
}

/* Change the next hop of an entry from p_other.via to p.p.via. Returns path_args.result. */
static __noinline int move(const struct path_args *args)
{
	struct path *p = find_path(&args->key);
	union path_acked a, n;

	if (!p || !(p->word.flags & PATH_SPLICED))
		return 1;
	a = path_acked(p);
	n = a;
	n.via = (a.via & ~VIA_INDEX) | (args->p.p.via & VIA_INDEX);
	/* Packets change the word, too. If the swap fails, user space tries again. */
	if ((a.via & VIA_INDEX) != args->p_other.via ||
	    __sync_val_compare_and_swap((__u64 *)&p->max_ack, a.all, n.all) != a.all)
		return 1;
	return 0;
}

/* Write a next hop to the leg's record, as if the socket had sent a segment there. Returns path_args.result. */
static __noinline int lead(const struct path_args *args)
{
	struct leg *l = bpf_map_lookup_elem(&legs, &args->key);
	__u32 via = args->p.p.via & VIA_INDEX;
	struct via *v = bpf_map_lookup_elem(&vias, &via);

	if (!l || !v)
		return 1;
	l->ifindex = v->ifindex;
	__builtin_memcpy(l->dmac, v->dmac, 12);
	return 0;
}

/* Mark the leg as not tracked: the programs were detached for a while, so max_in and max_out may be too low. */
static __always_inline void mistrust(struct tuple *t)
{
	struct leg *l = bpf_map_lookup_elem(&legs, t);

	if (l)
		__sync_fetch_and_and(&l->flags, ~LEG_TRACKED);
}

#define SLOTS_AT_ONCE 1024 /* limit of one call, so that it does not occupy its processor for long */

/* Find the key of the next entry. Returns path_args.result. */
static __noinline int next_key(struct path_args *args)
{
	int i, r;

	bpf_for(i, 0, SLOTS_AT_ONCE) {
		r = key_of_slot(args->slot, &args->key, args->op != PATH_OP_NEXT);
		if (r < 0)
			return r;
		args->slot++;
		if (!r)
			return 0;
	}
	return 1;
}

#define LEFT_ALONE 120000000000ll /* ns */

/* Report from the leg's record, if there is one. Returns 1 if the leg is in control mode or has no record, or if its host was
 * silent for so long in a switch that no process may be left to finish it. */
static __always_inline int describe(struct path_args *args)
{
	struct leg *l = bpf_map_lookup_elem(&legs, &args->key);

	if (!l)
		return 1;
	args->leg_flags = l->flags;
	args->ifindex = l->ifindex;
	if (l->flags & LEG_SPLICED)
		return 0;
	return !(l->phase_in | l->phase_out) || (__s64)(bpf_ktime_get_ns() - l->seen) > LEFT_ALONE;
}

/* Read the entry or, for PATH_OP_PUT, write it. With a stack frame of its own, as above. */
static __noinline int exchange(struct path_args *args)
{
	__s64 seat = seat_of(&args->key);

	if (tuple_is_v4(&args->key)) {
		struct slot4 *s = seat4(seat);

		if (s && args->op == PATH_OP_PUT)
			s->p.p = args->p.p;
		else if (s)
			args->p.p = s->p.p;
		return 0;
	}
	struct slot6 *s = seat6(seat);

	if (s && args->op == PATH_OP_PUT)
		s->p = args->p;
	else if (s)
		args->p = s->p;
	return 0;
}

/* Read the entry of `other`. Returns 0 if there is none. */
static __noinline int read_other(struct path_args *args)
{
	const struct path *p = find_path(&args->other);

	if (p)
		args->p_other = *p;
	return !!p;
}

/* Tell which connections the entries of `key` and `other` belong to. */
static __noinline int tell_generations(struct path_args *args)
{
	args->generation = generation(&args->key);
	args->other_generation = args->other.lport ? generation(&args->other) : 0;
	return 0;
}

static __always_inline int is_walk(__u32 op)
{
	return op == PATH_OP_NEXT || op == PATH_OP_IDLE || op == PATH_OP_STOPPED;
}

/* Does the operation concern whichever connection has the entry? In a walk, the generation is still that of the last entry. */
static __always_inline int is_for_any(__u32 op)
{
	return op == PATH_OP_GET || op == PATH_OP_ADD || op == PATH_OP_PUT || is_walk(op);
}

/* Run a path_op on the table of path entries. */
SEC("syscall")
int path_entry(struct path_args *ctx)
{
	struct path_args args = *ctx;
	int found;

	if (is_walk(args.op)) {
		args.result = next_key(&args);
		if (args.result)
			goto out;
	}
	if (args.op == PATH_OP_IDLE) {
		args.result = !describe(&args);
		goto tell;
	}
	if (args.op == PATH_OP_DECIDED) {
		decided(&args.key);
		decided(&args.other);
		goto out;
	}
	if (args.op == PATH_OP_MOVE || args.op == PATH_OP_HOP) {
		args.result = args.op == PATH_OP_MOVE ? move(&args) : lead(&args);
		goto out;
	}
	if (args.op == PATH_OP_REMOVE || args.op == PATH_OP_CLEAR || args.op == PATH_OP_SWEEP || args.op == PATH_OP_RETURN) {
		args.result = forget_flow(&args);
		goto out;
	}
	found = seat_of(&args.key) >= 0;
	args.result = !found;
	if (!is_for_any(args.op) && !is_meant(&args.key, args.generation))
		goto out;
	if (args.op == PATH_OP_UNTAP)
		untap(&args.key);
	else if (args.op == PATH_OP_TRACED || args.op == PATH_OP_UNTRACED || args.op == PATH_OP_DEAD)
		set_flag(&args);
	else if (args.op == PATH_OP_UNSEEN)
		mistrust(&args.key);
	else if (args.op == PATH_OP_ADD)
		args.result = found ? 1 : add(&args);
	else if (!found && args.op == PATH_OP_PUT)
		args.result = insert_path(&args.key);
	if (args.result < 0)
		goto out;
	if (args.op == PATH_OP_GET && args.other.lport)
		args.result |= !read_other(&args);
	exchange(&args);
tell:
	tell_generations(&args);
out:
	*ctx = args;
	return 0;
}

/* Remove the entries of many flows that are over. */
SEC("syscall")
int clear_ended(struct clear_call *ctx)
{
	const __u32 size = sizeof(struct ended_flow), legs = sizeof(struct tuple) * 2, generations = size - legs;
	struct path_args args = { .op = PATH_OP_CLEAR };
	__u64 kept = 0;
	__u32 i;

	bpf_for(i, 0, CLEAR_FLOWS) {
		if (i >= ctx->count)
			break;
		/* two copies: another struct would not fit on the stack */
		if (bpf_copy_from_user(&args.key, legs, (const void *)(ctx->flows + i * size)) ||
		    bpf_copy_from_user(&args.generation, generations, (const void *)(ctx->flows + i * size + legs)))
			kept |= 3ull << i * 2;
		else
			kept |= (__u64)forget_flow(&args) << i * 2;
	}
	ctx->kept = kept;
	return 0;
}

#endif
