/* SPDX-License-Identifier: Apache-2.0 */
#include "calibration.h"

#include <stdatomic.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "an element's bytes are the lowest of its bits");

enum { BLOCK = 4096 }; /* bytes that are predicted at once */

struct compared {
	_Atomic uint64_t sends;
	_Atomic uint64_t bytes;
	_Atomic uint64_t mismatches;
};

static struct compared compared[CHANNELS_MAX][SHADOW_IDS_MAX];
static atomic_bool runs;

/* SplitMix64's finalizer (Steele, Lea and Flood, 2014). */
static uint64_t mix(uint64_t value)
{
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
	value = (value ^ value >> 27) * 0x94d049bb133111eb;
	return value ^ value >> 31;
}

/* The bits of an element. Of the two bits behind the sign, exactly one is set. So every floating-point type reads a
 * normal number, which keeps its bits when zeros are added. */
static uint64_t bits_of(uint32_t bucket, uint64_t element, uint32_t itemsize)
{
	uint32_t top = 8 * itemsize - 2;
	uint64_t bits = mix(((uint64_t)bucket << 40 ^ element) + 0x9e3779b97f4a7c15);

	return (bits & ~(1ull << top)) | (~bits >> (top - 1) & 1) << top;
}

static void predict(uint32_t bucket, uint64_t first, uint64_t count, uint32_t itemsize, void *out)
{
	for (uint64_t i = 0; i < count; i++) {
		uint64_t bits = bits_of(bucket, first + i, itemsize);

		switch (itemsize) { /* the compiler makes a move of each */
		case 8:
			memcpy((char *)out + 8 * i, &bits, 8);
			break;
		case 4:
			memcpy((char *)out + 4 * i, &bits, 4);
			break;
		case 2:
			memcpy((char *)out + 2 * i, &bits, 2);
			break;
		default:
			memcpy((char *)out + i, &bits, 1);
		}
	}
}

int checkmate_nccl_predict(uint32_t bucket, uint64_t first, uint64_t count, void *out)
{
	struct nccl_bucket layout;

	if (!job_copy_bucket(bucket, &layout) || first > layout.elements || count > layout.elements - first)
		return -1;
	predict(bucket, first, count, layout.itemsize, out);
	return 0;
}

void checkmate_nccl_calibrate(int on)
{
	for (uint32_t i = 0; on && i < CHANNELS_MAX * SHADOW_IDS_MAX; i++) {
		struct compared *counts = &compared[i / SHADOW_IDS_MAX][i % SHADOW_IDS_MAX];

		atomic_store(&counts->sends, 0);
		atomic_store(&counts->bytes, 0);
		atomic_store(&counts->mismatches, 0);
	}
	atomic_store(&runs, on);
}

void checkmate_nccl_calibrated(uint32_t channel, uint32_t shadow_id, uint64_t *sends, uint64_t *bytes,
			       uint64_t *mismatches)
{
	const struct compared *counts;

	*sends = *bytes = *mismatches = 0;
	if (channel >= CHANNELS_MAX || shadow_id >= SHADOW_IDS_MAX)
		return;
	counts = &compared[channel][shadow_id];
	*bytes = atomic_load(&counts->bytes); /* first, because it is added last */
	*sends = atomic_load(&counts->sends);
	*mismatches = atomic_load(&counts->mismatches);
}

bool calibration_runs(void)
{
	return atomic_load(&runs);
}

/* Return the first element that differs, or the number of elements if none does. */
static uint64_t first_difference(uint32_t bucket, uint32_t itemsize, const struct sent *sent, const char *data)
{
	char expected[BLOCK];
	uint64_t at, size = BLOCK / itemsize;

	for (at = 0; at < sent->count; at += size) {
		uint64_t count = sent->count - at < size ? sent->count - at : size;

		predict(bucket, sent->first + at, count, itemsize, expected);
		if (!memcmp(expected, data + at * itemsize, count * itemsize))
			continue;
		while (!memcmp(expected + at % size * itemsize, data + at * itemsize, itemsize))
			at++;
		return at;
	}
	return sent->count;
}

void calibration_compare(uint32_t channel, uint32_t shadow_id, uint32_t bucket, uint32_t step, const struct sent *sent,
			 const void *data)
{
	struct compared *counts = &compared[channel][shadow_id];
	struct nccl_bucket layout;
	uint64_t different;

	if (!job_copy_bucket(bucket, &layout))
		return;
	different = first_difference(bucket, layout.itemsize, sent, data);
	if (different < sent->count) {
		atomic_fetch_add(&counts->mismatches, 1);
		job_fail("calibration: bucket %u, channel %u, step %u: element %llu differs from the prediction",
			 bucket, channel, step, (unsigned long long)(sent->first + different));
	}
	atomic_fetch_add(&counts->sends, 1);
	atomic_fetch_add(&counts->bytes, sent->count * layout.itemsize);
}
