/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* siphash.h for messages of any length, so that it can be compared with the reference. */
#include <stddef.h>
#include <string.h>
#include "tpot/siphash.h"

__u64 model_siphash(const __u64 *key, const __u8 *message, size_t len)
{
	struct sip s = sip_start(key);
	__u64 word, last = (__u64)len << 56;

	for (; len >= 8; len -= 8, message += 8) {
		memcpy(&word, message, 8);
		sip_word(&s, word);
	}
	memcpy(&last, message, len);
	sip_word(&s, last);
	return sip_end(&s);
}
