/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): a keyed hash of 64 bits for short messages. It
 * needs additions, rotations and XOR only, so it is cheap in eBPF. A message is hashed in words of eight bytes, the last of which
 * holds the rest and, in its top byte, the message's length modulo 256. Words, keys and the hash are little-endian. */
#ifndef LONGSPLICE_SIPHASH_H
#define LONGSPLICE_SIPHASH_H

#include <linux/types.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read from memory as they are"
#endif

struct sip {
	__u64 v0, v1, v2, v3;
};

static inline __attribute__((always_inline)) __u64 sip_rotate(__u64 v, int bits)
{
	return v << bits | v >> (64 - bits);
}

static inline __attribute__((always_inline)) void sip_rounds(struct sip *s, int n)
{
	while (n--) {
		s->v0 += s->v1;
		s->v1 = sip_rotate(s->v1, 13) ^ s->v0;
		s->v0 = sip_rotate(s->v0, 32);
		s->v2 += s->v3;
		s->v3 = sip_rotate(s->v3, 16) ^ s->v2;
		s->v0 += s->v3;
		s->v3 = sip_rotate(s->v3, 21) ^ s->v0;
		s->v2 += s->v1;
		s->v1 = sip_rotate(s->v1, 17) ^ s->v2;
		s->v2 = sip_rotate(s->v2, 32);
	}
}

static inline __attribute__((always_inline)) struct sip sip_start(const __u64 *key)
{
	return (struct sip){
		.v0 = key[0] ^ 0x736f6d6570736575, .v1 = key[1] ^ 0x646f72616e646f6d,
		.v2 = key[0] ^ 0x6c7967656e657261, .v3 = key[1] ^ 0x7465646279746573,
	};
}

static inline __attribute__((always_inline)) void sip_word(struct sip *s, __u64 word)
{
	s->v3 ^= word;
	sip_rounds(s, 2);
	s->v0 ^= word;
}

static inline __attribute__((always_inline)) __u64 sip_end(struct sip *s)
{
	s->v2 ^= 0xff;
	sip_rounds(s, 4);
	return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

#endif
