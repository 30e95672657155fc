/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Cut the end of a packet off. */
#ifndef LONGSPLICE_TAIL_H
#define LONGSPLICE_TAIL_H

#include <asm-generic/errno.h>
#include "compat.h"

#define ENOTSUPP 524 /* the kernel's own, not in its headers for user space */

static const __u8 zeros[128];

/* Cut the packet to `len` bytes, counted from its Ethernet header. Its IP length must say the same.
 *
 * The kernel does not cut a packet that it takes for tunnelled. Before Linux 7.1 or so, one that was decapsulated here stays so,
 * if it has come from this machine or was joined by the device (GRO). Then the bytes are overwritten with zeros, which change no
 * checksum, and stay behind the IP packet, where receivers ignore them as they do padding (RFC 1122, 3.2.1). A super-packet would
 * be segmented by its real length, and is refused unless it goes to_socket: the IP layer cuts it before anything else. Returns 0,
 * or a negative number. */
__noinline int cut_off(struct __sk_buff *skb, __u32 len, __u32 to_socket)
{
	int r = bpf_skb_change_tail(skb, len, 0), i;

	if (r != -ENOTSUPP || to_socket)
		return r == -ENOTSUPP ? 0 : r;
	if (skb->gso_size)
		return r;
	bpf_for(i, 0, 65536 / 64) {
		__u32 at = len + i * 64, left = skb->len - at;

		if (at >= skb->len)
			break;
		left = left > 64 ? 64 : left;
		asm volatile("%0 &= 127" : "+r"(left)); /* so that the verifier knows its range */
		if (!left || bpf_skb_store_bytes(skb, at, zeros, left, 0))
			return -1;
	}
	return 0;
}

#endif
