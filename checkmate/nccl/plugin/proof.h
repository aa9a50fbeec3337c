/* SPDX-License-Identifier: Apache-2.0
 *
 * How two ranks prove to each other that they have the key of a meeting, without showing it: the side that connects
 * sends a nonce, the other a nonce and a MAC over both, and the first a MAC of its own. Pure. The Python ring does the
 * same (checkmate/ring/greetings.py).
 */
#ifndef CHECKMATE_NCCL_PROOF_H
#define CHECKMATE_NCCL_PROOF_H

#include <stdbool.h>
#include <stddef.h>

enum { KEY_BYTES = 16, NONCE_BYTES = 16, MAC_BYTES = 16 };
enum proof_side { CONNECTS, ACCEPTS };

/* What the side that accepts sends. */
struct proof_answer {
	unsigned char nonce[NONCE_BYTES];
	unsigned char mac[MAC_BYTES];
};

struct proof {
	unsigned char key[KEY_BYTES];
	unsigned char nonces[2][NONCE_BYTES]; /* by side */
};

/* Return whether `size` random bytes are at `bytes` now. */
bool proof_random(unsigned char *bytes, size_t size);
/* Compute a side's MAC. */
void proof_mac(const struct proof *proof, enum proof_side side, unsigned char mac[MAC_BYTES]);
/* Return whether `mac` is that of a side, in constant time. */
bool proof_holds(const struct proof *proof, enum proof_side side, const unsigned char mac[MAC_BYTES]);

#endif
