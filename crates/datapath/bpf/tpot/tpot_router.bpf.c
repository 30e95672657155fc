// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Translucent proxying: the router of a farm of proxies (TPARTY). It sends SYNs with the option to a member of the farm. All
 * other packets are routed as ever: those of a connection that a member has intercepted are addressed to it (IP in IP), so the
 * router has no state of any connection.
 *
 * The program sees what leaves by the router's other devices. So a SYN has passed routes and firewalls already when it is sent to
 * a member instead, with one hop less, and the one that a member sends back takes its way like any other packet.
 */
#include "siphash.h"
#include "tpot_match.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

const volatile enum tpot_router_verdict router_verdict_layout;

#define AF_INET 2 /* <sys/socket.h> */
#define AF_INET6 10

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tpot_farm);
} tpot_farm SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TPOT_MEMBERS);
	__type(key, __u32);
	__type(value, struct tpot_address);
} tpot_members SEC(".maps");

/* The index of each slot's member, plus 1; 0: none. First those of IPv4, then those of IPv6. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u8[TPOT_SLOTS]);
} tpot_slots SEC(".maps");

/* How many SYNs each member got. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TPOT_MEMBERS);
	__type(key, __u32);
	__type(value, __u64);
} tpot_chosen SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, R_MAX);
	__type(key, __u32);
	__type(value, __u64);
} tpot_routed SEC(".maps");

static __always_inline void count(void *counters, __u32 which)
{
	__u64 *n = bpf_map_lookup_elem(counters, &which);

	if (n)
		(*n)++;
}

static __always_inline int leave(__u32 verdict)
{
	count(&tpot_routed, verdict);
	return TCX_NEXT;
}

/* The slot of a SYN, the same for its retransmissions. */
static __always_inline __u32 slot_of(const struct tpot_farm *farm, const struct packet *p)
{
	const __u32 *w = (const __u32 *)&p->t;
	struct sip s = sip_start(farm->key);
	int i;

#pragma unroll
	for (i = 0; i < 8; i += 2)
		sip_word(&s, (__u64)w[i + 1] << 32 | w[i]);
	sip_word(&s, (__u64)p->seq << 32 | w[8]); /* both ports */
	return sip_end(&s) & (TPOT_SLOTS - 1);
}

/* Look up the route between two addresses of the farm's family. */
static __always_inline long look_up(struct __sk_buff *skb, struct bpf_fib_lookup *fib, int v6, const __u32 *from, const __u32 *to,
				    __u32 flags)
{
	fib->family = v6 ? AF_INET6 : AF_INET;
	if (v6) {
		__builtin_memcpy(fib->ipv6_src, from, 16);
		__builtin_memcpy(fib->ipv6_dst, to, 16);
	} else {
		fib->ipv4_src = from[3];
		fib->ipv4_dst = to[3];
	}
	return bpf_fib_lookup(skb, fib, sizeof(*fib), flags);
}

/* Does the way from a member to the SYN's source lead through this router to another network? Otherwise the source is in the
 * farm's network, maybe a member itself; or its address is our own, because the SYN was translated, and the member's answer would
 * come to us. */
static __always_inline int can_return(struct __sk_buff *skb, const struct packet *p, const struct tpot_farm *farm,
				      const struct tpot_address *member)
{
	struct bpf_fib_lookup fib = { .ifindex = farm->ifindex };
	long r = look_up(skb, &fib, p->v6, member->words, p->t.local, 0);

	return (r == BPF_FIB_LKUP_RET_SUCCESS || r == BPF_FIB_LKUP_RET_NO_NEIGH) && fib.ifindex != farm->ifindex;
}

/* Is the member's link address known, as it is while the member answers checks? A packet that has to wait for it would go to the
 * next hop of its own route in the end, which the kernel looks up again (neigh_update()). */
static __always_inline int is_neighbour(struct __sk_buff *skb, const struct packet *p, const struct tpot_farm *farm,
					const struct tpot_address *member)
{
	struct bpf_fib_lookup fib = { .ifindex = farm->ifindex };

	return look_up(skb, &fib, p->v6, member->words, member->words, BPF_FIB_LOOKUP_OUTPUT) == BPF_FIB_LKUP_RET_SUCCESS;
}

SEC("tcx/egress")
int tpot_router(struct __sk_buff *skb)
{
	struct bpf_redir_neigh hop = {};
	struct tpot_address *member;
	struct tpot_farm *farm;
	struct packet p = {};
	struct options *o;
	__u32 zero = 0, v6, index;
	__u8 *slots;

	if (!skb->ingress_ifindex /* our own */ || !parse_frame(skb, &p, 1) || p.proto != IPPROTO_TCP ||
	    (p.flags & (TH_SYN | TH_ACK)) != TH_SYN)
		return TCX_NEXT;
	o = read_options(skb, &p);
	if (!o || o->size != sizeof(struct tpot_option))
		return leave(R_UNASKED);
	v6 = p.v6;
	farm = bpf_map_lookup_elem(&tpot_farm, &zero);
	slots = bpf_map_lookup_elem(&tpot_slots, &v6);
	if (!farm || !slots) /* arrays have all of their entries: never */
		return TCX_NEXT;
	if (skb->ingress_ifindex == farm->ifindex)
		return leave(R_RETURNED);
	if (!o->hops || !rule_for(TPOT_RULE_TAKE, &p.t))
		return leave(R_LEFT);
	index = slots[slot_of(farm, &p)];
	if (!index)
		return leave(R_NO_MEMBER);
	index--;
	member = bpf_map_lookup_elem(&tpot_members, &index);
	if (!member || !can_return(skb, &p, farm, member))
		return leave(R_NO_RETURN);
	if (!is_neighbour(skb, &p, farm, member))
		return leave(R_NO_MEMBER);
	if (v6) {
		hop.nh_family = AF_INET6;
		__builtin_memcpy(hop.ipv6_nh, member->words, 16);
	} else {
		hop.nh_family = AF_INET;
		hop.ipv4_nh = member->words[3];
	}
	count(&tpot_chosen, index);
	count(&tpot_routed, R_CHOSEN);
	return bpf_redirect_neigh(farm->ifindex, &hop, sizeof(hop), 0);
}
