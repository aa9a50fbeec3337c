/* SPDX-License-Identifier: Apache-2.0
 *
 * The comparison of what NCCL sends with what it is expected to send. Rank 0 fills each bucket with values that follow
 * from the elements' places, and the others with zeros. So the sum is known at every rank, bit by bit.
 */
#ifndef CHECKMATE_NCCL_CALIBRATION_H
#define CHECKMATE_NCCL_CALIBRATION_H

#include <stdbool.h>
#include <stdint.h>

#include "job.h"
#include "slicing.h"

/* Begin the calibration, with all counts 0, or end it. Collectives that are launched in between are compared. */
EXPORTED void checkmate_nccl_calibrate(int on);
/* Write `count` elements of a bucket from `first` on, in the machine's byte order. Return 0, or -1 for a bad place. */
EXPORTED int checkmate_nccl_predict(uint32_t bucket, uint64_t first, uint64_t count, void *out);
/* Return what was compared on a channel of a shard. A mismatch is a send. */
EXPORTED void checkmate_nccl_calibrated(uint32_t channel, uint32_t shadow_id, uint64_t *sends, uint64_t *bytes,
					uint64_t *mismatches);

bool calibration_runs(void);
/* Compare a fully reduced send. The first difference stops tagging. */
void calibration_compare(uint32_t channel, uint32_t shadow_id, uint32_t bucket, uint32_t step, const struct sent *sent,
			 const void *data);

#endif
