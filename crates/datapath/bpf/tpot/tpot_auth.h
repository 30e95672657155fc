/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translucent proxying: the authenticator of a taker's answer, which proves that the taker has a key of the asker. */
#ifndef LONGSPLICE_TPOT_AUTH_H
#define LONGSPLICE_TPOT_AUTH_H

#include "siphash.h"
#include "tpot_packet.h"

static __always_inline struct signing *signing(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&tpot_signing, &zero);
}

/* Compute the MAC of what is in the scratch space, with the key of this index. Returns 0 if there is one. Global, so that the
 * verifier checks its loop once. */
__noinline int sign(__u32 key)
{
	struct tpot_config *c = configured();
	struct signing *s = signing();
	struct sip sip;
	__u32 i;

	if (!c || !s || key >= TPOT_KEYS || key >= c->keys)
		return -1;
	sip = sip_start(c->key[key]);
	for (i = 0; i < sizeof(s->covered) / 8; i++)
		sip_word(&sip, ((__u64 *)&s->covered)[i]);
	sip_word(&sip, (__u64)sizeof(s->covered) << 56);
	s->mac = sip_end(&sip);
	return 0;
}

/* Set what the MAC covers besides the option. isn: of the SYN. */
static __always_inline void cover(struct signing *s, const __u32 *asker, __u16 asker_port, const __u32 *server,
				  __u16 server_port, __u32 isn, const __u32 *taker)
{
	s->covered.option = s->answer.option;
	__builtin_memcpy(s->covered.asker, asker, 16);
	__builtin_memcpy(s->covered.server, server, 16);
	__builtin_memcpy(s->covered.taker, taker, 16);
	s->covered.asker_port = asker_port;
	s->covered.server_port = server_port;
	s->covered.isn = bpf_htonl(isn);
}

/* Append our option to a taker's SYN-ACK: signed, if there are keys. Returns what append() does. */
static __always_inline int append_answer(struct __sk_buff *skb, const struct packet *p, const struct tpot_syn *syn, int udp)
{
	struct tpot_config *c = configured();
	struct signing *s = signing();
	__u32 signs;

	if (!c || !s)
		return -1;
	signs = c->keys;
	s->answer.option = our_option(c, signs ? sizeof(s->answer) : sizeof(s->answer.option), syn->hops - 1,
				      udp ? TPOT_CAN_UDP : 0);
	if (!signs)
		return append(skb, p, &s->answer.option, sizeof(s->answer.option));
	cover(s, p->t.remote, p->t.rport, p->t.local, p->t.lport, syn->seq, syn->own);
	if (sign(0))
		return -1;
	s->answer.mac = s->mac;
	return append(skb, p, &s->answer, sizeof(s->answer));
}

/* May the sender of this answer, which came from `taker`, intercept? Always, if there are no keys. */
static __always_inline int may_answer(struct __sk_buff *skb, const struct packet *p, const struct options *o,
				      const struct tpot_syn *syn, const __u32 *taker)
{
	struct tpot_config *c = configured();
	struct signing *s = signing();
	__u32 k;

	if (!c || !s)
		return 0;
	if (!c->keys)
		return 1;
	if (o->size != sizeof(s->answer) || bpf_skb_load_bytes(skb, p->l4 + 20 + o->at, &s->answer, sizeof(s->answer)))
		return 0;
	cover(s, p->t.local, p->t.lport, p->t.remote, p->t.rport, syn->seq, taker);
	for (k = 0; k < TPOT_KEYS; k++)
		if (!sign(k) && s->mac == s->answer.mac)
			return 1;
	return 0;
}

#endif
