/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What impair.rs and lab.bpf.c share: the places in two arrays of 64-bit numbers. build.rs makes the Rust constants
 * out of these enums, so this is their only definition. One name a line.
 */
#ifndef LAB_H
#define LAB_H

/* Places in `settings`. Probabilities are in units of 2^-32. */
enum setting {
	SETTING_SEED,
	SETTING_LOSS,
	/* Only so many packets of each connection can be lost by SETTING_LOSS; 0: all. */
	SETTING_LOSS_AMONG_FIRST,
	SETTING_DUPLICATE,
	SETTING_REORDER,
	SETTING_MARK,
	SETTING_DROP_EVERY,
	/* Every packet takes the detour; otherwise only reordered ones do. */
	SETTING_DETOUR_ALL,
	/* Interface number of the near end of the detour. */
	SETTING_DETOUR,
	/* Interface number of the impaired device. */
	SETTING_DEVICE,
	/* The direction that is impaired: 1 for what the device receives. */
	SETTING_INGRESS,
	SETTINGS
};

/* Places in `counts`. */
enum count {
	COUNT_SEEN,
	COUNT_LOST,
	COUNT_DUPLICATED,
	COUNT_MARKED,
	COUNTS
};

#endif
