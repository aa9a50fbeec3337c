/* SPDX-License-Identifier: Apache-2.0
 *
 * The MAC is SipHash-2-4 with 128 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): short enough
 * to be read here, so that the plugin needs no library.
 */
#include "proof.h"

#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#include "job.h"

enum { MESSAGE_BYTES = 1 + 2 * NONCE_BYTES };

static uint64_t rotated(uint64_t word, int bits)
{
	return word << bits | word >> (64 - bits);
}

static uint64_t little_endian(const unsigned char *bytes, size_t count)
{
	uint64_t word = 0;

	for (size_t i = 0; i < count; i++)
		word |= (uint64_t)bytes[i] << (8 * i);
	return word;
}

static void mix(uint64_t v[4], int rounds)
{
	while (rounds--) {
		v[0] += v[1];
		v[1] = rotated(v[1], 13) ^ v[0];
		v[0] = rotated(v[0], 32);
		v[2] += v[3];
		v[3] = rotated(v[3], 16) ^ v[2];
		v[0] += v[3];
		v[3] = rotated(v[3], 21) ^ v[0];
		v[2] += v[1];
		v[1] = rotated(v[1], 17) ^ v[2];
		v[2] = rotated(v[2], 32);
	}
}

static void absorb(uint64_t v[4], uint64_t word)
{
	v[3] ^= word;
	mix(v, 2);
	v[0] ^= word;
}

void checkmate_nccl_mac(const unsigned char *key, const unsigned char *message, size_t size, unsigned char *mac)
{
	uint64_t low = little_endian(key, 8), high = little_endian(key + 8, 8), half;
	uint64_t v[4] = {low ^ 0x736f6d6570736575, high ^ 0x646f72616e646f6d ^ 0xee, low ^ 0x6c7967656e657261,
			 high ^ 0x7465646279746573};
	size_t i;

	for (i = 0; i + 8 <= size; i += 8)
		absorb(v, little_endian(message + i, 8));
	absorb(v, little_endian(message + i, size - i) | (uint64_t)size << 56);
	v[2] ^= 0xee;
	mix(v, 4);
	half = v[0] ^ v[1] ^ v[2] ^ v[3];
	for (i = 0; i < 8; i++)
		mac[i] = (unsigned char)(half >> (8 * i));
	v[1] ^= 0xdd;
	mix(v, 4);
	half = v[0] ^ v[1] ^ v[2] ^ v[3];
	for (i = 0; i < 8; i++)
		mac[8 + i] = (unsigned char)(half >> (8 * i));
}

bool proof_random(unsigned char *bytes, size_t size)
{
	return getrandom(bytes, size, 0) == (ssize_t)size;
}

void proof_mac(const struct proof *proof, enum proof_side side, unsigned char mac[MAC_BYTES])
{
	unsigned char message[MESSAGE_BYTES] = {(unsigned char)side}; /* so that a MAC can't be sent back */

	memcpy(message + 1, proof->nonces, sizeof(proof->nonces));
	checkmate_nccl_mac(proof->key, message, sizeof(message), mac);
}

bool proof_holds(const struct proof *proof, enum proof_side side, const unsigned char mac[MAC_BYTES])
{
	unsigned char right[MAC_BYTES], different = 0;

	proof_mac(proof, side, right);
	for (int i = 0; i < MAC_BYTES; i++)
		different |= right[i] ^ mac[i];
	return !different;
}
