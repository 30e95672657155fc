/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What flood.rs and flood.bpf.c share: the places in two arrays of 64-bit numbers. build.rs makes the Rust constants
 * out of these enums, so this is their only definition. One name a line.
 */
#ifndef FLOOD_H
#define FLOOD_H

/* Places in `settings`. Addresses and ports in host byte order. */
enum flood_setting {
	/* Interface number of the client's device. */
	FLOOD_DEVICE,
	/* Ethernet addresses, the first byte lowest. */
	FLOOD_TO_MAC,
	FLOOD_FROM_MAC,
	/* How many flows, up to 2^32 - 1. */
	FLOOD_FLOWS,
	/* Source of the first flow. */
	FLOOD_SOURCE,
	FLOOD_SOURCE_PORT,
	/* The next address after 2 to the power of so many ports. */
	FLOOD_PORT_BITS,
	/* Where packets are sent to. */
	FLOOD_TARGET,
	FLOOD_TARGET_PORT,
	/* The port by which the sink knows them. */
	FLOOD_SINK_PORT,
	/* Sequence number of the first packet of each flow, and the acknowledgement of all. */
	FLOOD_SEQ,
	FLOOD_ACK,
	FLOOD_SETTINGS
};

/* Places in `counts`. */
enum flood_count {
	FLOOD_SENT,
	FLOOD_ARRIVED,
	/* Arrived with a checksum that is not right; only the first packets are looked at. */
	FLOOD_WRONG,
	FLOOD_COUNTS
};

#endif
