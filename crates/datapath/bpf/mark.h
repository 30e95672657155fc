/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Marks that the programs on a device leave on packets: for each other, and for the routing rules. Packets from outside have
 * none. */
#ifndef LONGSPLICE_MARK_H
#define LONGSPLICE_MARK_H

enum mark {
	MARK_LOCAL = 0x6c73706c,   /* the socket's clone on its way through ingress() */
	MARK_TRANSPARENT = 0x6c73706d, /* for a socket whose address is not ours: a routing rule delivers it locally */
	MARK_HELD = 0x6c73706e,    /* a held segment on its way back */
	MARK_TAKEN = 0x6c737074,   /* of a connection that tpot.bpf.c has intercepted: its socket's address is not ours */
	MARK_PLAIN = 0x6c737070,   /* a packet that belongs to no tunnel of tpot.bpf.c, and to no connection of ours */
	MARK_HOPS = 0x6c737100,    /* of the SYNs of a socket: how many proxies may intercept them, in the low byte */
};

/* skb->tc_index of a packet that tpot_egress() can skip: the kernel routes it, and no program has changed it, or it is in its
 * tunnel already. It saves a look-up for each packet that merely passes. A packet without it is looked up. The low four bits are
 * zero because GRED reads them. */
#define INDEX_PASSES 0x6c70

#define IS_OUR_MARK(mark) (((mark) & 0xffffff00) == 0x6c737000)

#endif
