/* SPDX-License-Identifier: Apache-2.0
 *
 * The profiler that NCCL loads: versions 3 to 6 over `events`.
 */
#include <stdlib.h>

#include "events.h"
#include "job.h"

struct watched {
	uint64_t comm_hash;
};

/* Only events of the gradients' communicator matter, but NCCL asks one mask of the whole process. */
static int watch(void **context, int *mask, uint64_t comm_hash, int nodes, int ranks, nccl_logger log)
{
	struct watched *made = malloc(sizeof(*made));

	if (!made)
		return NCCL_SYSTEM_ERROR;
	made->comm_hash = comm_hash;
	*context = made;
	if (log)
		job_use_logger(log);
	if (!job_present()) {
		*mask = 0;
		return NCCL_SUCCESS;
	}
	*mask = EVENTS_MASK;
	job_meet(comm_hash);
	if (job_is_ours(comm_hash) && nodes != ranks)
		job_fail("the gradients' communicator has %d ranks on %d nodes: use one rank for each node", ranks, nodes);
	return NCCL_SUCCESS;
}

static int init_v3(void **context, int *mask)
{
	*context = NULL;
	*mask = job_present() ? EVENTS_MASK : 0;
	return NCCL_SUCCESS;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t comm_hash, int nodes, int ranks, int rank,
		   nccl_logger log)
{
	(void)name, (void)rank;
	return watch(context, mask, comm_hash, nodes, ranks, log);
}

static int init_v5(void **context, uint64_t comm_hash, int *mask, const char *name, int nodes, int ranks, int rank,
		   nccl_logger log)
{
	(void)name, (void)rank;
	return watch(context, mask, comm_hash, nodes, ranks, log);
}

static void *start_below(uint64_t type, void *parent, const struct profiler_proxy_op *op, int step,
			 const struct profiler_net *net)
{
	switch (type) {
	case PROFILE_PROXY_OP:
		return start_op(parent, op);
	case PROFILE_PROXY_STEP:
		return start_step(parent, step);
	case PROFILE_NET_PLUGIN:
		start_net(parent, net);
		return NULL;
	default:
		return NULL;
	}
}

/* Version 3 knows its communicator only in a collective's event. */
static int start_v3(void *context, void **handle, struct profiler_event_v3 *event)
{
	(void)context;
	if (event->type == PROFILE_COLL) {
		job_meet(event->comm_hash);
		*handle = start_coll(event->comm_hash, &event->coll, false);
	} else {
		*handle = start_below(event->type, event->parent, &event->proxy_op, event->step, &event->net);
	}
	return NCCL_SUCCESS;
}

#define START(VERSION)                                                                                                 \
	static int start_v##VERSION(void *context, void **handle, struct profiler_event_v##VERSION *event)             \
	{                                                                                                              \
		const struct watched *watched = context;                                                               \
                                                                                                                       \
		if (event->type == PROFILE_COLL)                                                                       \
			*handle = watched ? start_coll(watched->comm_hash, &event->coll, true) : NULL;                 \
		else                                                                                                   \
			*handle = start_below(event->type, event->parent, &event->proxy_op, event->step, &event->net); \
		return NCCL_SUCCESS;                                                                                   \
	}

START(4)
START(5)

static int stop(void *handle)
{
	(void)handle;
	return NCCL_SUCCESS;
}

static int record(void *handle, int state, void *arguments)
{
	(void)arguments;
	record_state(handle, state);
	return NCCL_SUCCESS;
}

static int finalize(void *context)
{
	free(context);
	return NCCL_SUCCESS;
}

EXPORTED struct profiler_v3 ncclProfiler_v3 = {"Checkmate", init_v3, start_v3, stop, record, finalize};
EXPORTED struct profiler_v4 ncclProfiler_v4 = {"Checkmate", init_v4, start_v4, stop, record, finalize};
EXPORTED struct profiler_v5 ncclProfiler_v5 = {"Checkmate", init_v5, start_v5, stop, record, finalize};
EXPORTED struct profiler_v6 ncclProfiler_v6 = {"Checkmate", init_v5, start_v5, stop, record, finalize};
