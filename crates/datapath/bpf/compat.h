/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Definitions that <linux/bpf.h> of an older distribution lacks. The running kernel (6.6 or newer) has all of them.
 * Tested on Linux 6.12.107, 7.3.4. */
#ifndef LONGSPLICE_COMPAT_H
#define LONGSPLICE_COMPAT_H

#include <linux/bpf.h>
#include <linux/version.h>
#ifdef __bpf__ /* not if compiled for user space (model.c) */
#include <bpf/bpf_helpers.h>
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
struct bpf_iter_num {
	__u64 __opaque[1];
} __attribute__((aligned(8)));
#endif

/* enum tcx_action_base, since Linux 6.6. As macros, they can coexist with the enumerators. */
#define TCX_NEXT (-1)
#define TCX_DROP 2
#define TCX_REDIRECT 7

/* Flags of bpf_skb_adjust_room(), since Linux 6.3. As macros, too. */
#define BPF_F_ADJ_ROOM_DECAP_L3_IPV4 (1ull << 7)
#define BPF_F_ADJ_ROOM_DECAP_L3_IPV6 (1ull << 8)

#endif
