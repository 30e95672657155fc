// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The list of all loaded programs, for a process without CAP_SYS_ADMIN: BPF_PROG_GET_NEXT_ID needs that, an iterator only what
 * splicing needs anyway. One line for each program: its number, the number of its map of legs (0: it has none), and its name.
 */
#include "compat.h"
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define NAME 16	/* BPF_OBJ_NAME_LEN */
#define MAPS 64 /* MAX_USED_MAPS */

struct seq_file;

struct bpf_map {
	__u32 id;
	char name[NAME];
} __attribute__((preserve_access_index));

struct bpf_prog_aux {
	__u32 used_map_cnt;
	__u32 id;
	char name[NAME];
	struct bpf_map **used_maps;
} __attribute__((preserve_access_index));

struct bpf_prog {
	struct bpf_prog_aux *aux;
} __attribute__((preserve_access_index));

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

struct bpf_iter__bpf_prog {
	struct bpf_iter_meta *meta;
	struct bpf_prog *prog;
} __attribute__((preserve_access_index));

void *bpf_rdonly_cast(const void *, __u32) __ksym;

static __always_inline const struct bpf_map *map_at(struct bpf_prog_aux *aux, __u32 i)
{
	/* bpf_iter_num: a kernel type of eight bytes, as in eight_at() of kernel.h. A cast reads whatever is there, or 0. */
	struct bpf_iter_num *at = bpf_rdonly_cast(aux->used_maps + i, bpf_core_type_id_kernel(struct bpf_iter_num));

	return bpf_rdonly_cast((void *)at->__opaque[0], bpf_core_type_id_kernel(struct bpf_map));
}

static __always_inline int is_legs(const struct bpf_map *map)
{
	return map->name[0] == 'l' && map->name[1] == 'e' && map->name[2] == 'g' && map->name[3] == 's' && !map->name[4];
}

SEC("iter/bpf_prog")
int list_programs(struct bpf_iter__bpf_prog *ctx)
{
	static const char line[] = "%u %u %s\n";
	struct bpf_prog *prog = ctx->prog;
	struct bpf_prog_aux *aux;
	__u64 said[3] = {};

	if (!prog)
		return 0;
	aux = prog->aux;
	said[0] = aux->id;
	said[2] = (unsigned long)aux->name;
	for (__u32 i = 0; i < MAPS && i < aux->used_map_cnt; i++) {
		const struct bpf_map *map = map_at(aux, i);

		if (is_legs(map))
			said[1] = map->id;
	}
	bpf_seq_printf(ctx->meta->seq, line, sizeof(line), said, sizeof(said));
	return 0;
}
