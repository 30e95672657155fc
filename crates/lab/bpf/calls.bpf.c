/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counts the system calls of one process, by number. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "calls.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CALLS_SETTINGS);
	__type(key, __u32);
	__type(value, __u64);
} process SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CALLS_MAX);
	__type(key, __u32);
	__type(value, __u64);
} calls SEC(".maps");

SEC("raw_tp/sys_enter")
int enter(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 which = CALLS_PROCESS, number = ctx->args[1];
	__u64 *wanted = bpf_map_lookup_elem(&process, &which), *n = bpf_map_lookup_elem(&calls, &number);

	if (n && wanted && bpf_get_current_pid_tgid() >> 32 == *wanted)
		__sync_fetch_and_add(n, 1);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
