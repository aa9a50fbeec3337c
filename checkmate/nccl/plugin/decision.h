/* SPDX-License-Identifier: Apache-2.0
 *
 * What is decided about a send when it is accepted (`events`), and what that needs from the sends before it. Frames and
 * tags follow from it.
 */
#ifndef CHECKMATE_NCCL_DECISION_H
#define CHECKMATE_NCCL_DECISION_H

#include <stdbool.h>
#include <stdint.h>

struct event_op;
struct event_step;

/* What is known of a send before it is accepted. */
struct send_mark {
	const struct event_op *op; /* that this thread announced last; NULL for none */
	uint32_t step;
	bool by_op; /* profiler version 3, whose net events may name another step */
	const struct event_step *named; /* by NCCL's callback */
};

/* The last send that a connection accepted. */
struct send_order {
	uint64_t serial;
	uint32_t step;
	bool any;
};

struct send_decision {
	bool tagged;
	uint32_t epoch; /* of the job */
	uint32_t channel;
	uint32_t shadow_id;
	uint64_t position; /* in the stream */
};

#endif
