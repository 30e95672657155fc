/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What calls.rs and calls.bpf.c share. build.rs makes the Rust constants out of these enums. One name a line. */
#ifndef CALLS_H
#define CALLS_H

/* Places in `process`. */
enum calls_setting {
	/* Number of the process whose system calls are counted. */
	CALLS_PROCESS,
	CALLS_SETTINGS
};

/* More than any architecture has system calls. */
#define CALLS_MAX 1024

#endif
