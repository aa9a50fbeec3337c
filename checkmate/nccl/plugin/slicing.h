/* SPDX-License-Identifier: Apache-2.0
 *
 * The elements of a send of NCCL's ring AllReduce. tests/nccl/test_slicing.py compares it with
 * checkmate/wire/nccl_slicing.py, which explains it.
 */
#ifndef CHECKMATE_NCCL_SLICING_H
#define CHECKMATE_NCCL_SLICING_H

#include <stddef.h>
#include <stdint.h>

/* As `NcclSlicing` has them, which checks them. Mirrored in checkmate/nccl/library.py. */
struct slicing_sizes {
	uint32_t cell;
	uint32_t buffer;
	uint32_t alignment;
	uint32_t grain;
	uint32_t steps;
	uint32_t chunk_steps;
	uint32_t slice_steps;
};

/* A bucket, and the ring that reduces it. */
struct slicing {
	uint64_t elements;
	struct slicing_sizes sizes;
	uint32_t itemsize;
	uint32_t channels; /* of the communicator */
	uint32_t allowed; /* channels that NCCL may use for the bucket */
	uint32_t ranks;
	uint32_t index; /* of this rank in the ring */
};

struct sent {
	uint64_t first; /* element of the bucket */
	uint64_t count;
	int round; /* of the AllGather; negative for partial sums */
};

/* Return the number of channels that carry the bucket. */
uint32_t slicing_used(const struct slicing *slicing);
/* Describe send `step` on `channel`. Return 0, or -1 if the channel has no such step. */
int slicing_send(const struct slicing *slicing, uint32_t channel, uint32_t step, struct sent *sent);

#endif
