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
	struct watched *watched = malloc(sizeof(*watched));

	if (!watched)
		return NCCL_SYSTEM_ERROR;
	watched->comm_hash = comm_hash;
	*context = watched;
	if (log)
		job_use_logger(log);
	if (!job_present()) {
		*mask = 0;
		return NCCL_SUCCESS;
	}
	*mask = EVENTS_MASK;
	job_meet(comm_hash);
	if (job_is_ours(comm_hash) && (uint32_t)ranks != job_now()->ranks)
		job_fail("the gradients' communicator has %d ranks, and the job %u", ranks, job_now()->ranks);
	else if (job_is_ours(comm_hash) && nodes != ranks)
		job_fail("the gradients' communicator has %d ranks on %d nodes: use one rank for each node", ranks,
			 nodes);
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
	case PROFILE_GROUP:
		return events_start_group();
	case PROFILE_PROXY_OP:
		return events_start_op(parent, op);
	case PROFILE_PROXY_STEP:
		return events_start_step(parent, step);
	case PROFILE_NET_PLUGIN:
		events_start_net(parent, net);
		return NULL;
	default:
		return NULL;
	}
}

static bool is_ours(const struct watched *watched)
{
	return watched && job_is_ours(watched->comm_hash);
}

/* Version 3 knows its communicator only in a collective's event. */
static int start_v3(void *context, void **handle, struct profiler_event_v3 *event)
{
	(void)context;
	if (event->type == PROFILE_COLL) {
		job_meet(event->comm_hash);
		*handle = job_is_ours(event->comm_hash) ? events_start_coll(&event->coll, event->parent, false) : NULL;
	} else {
		*handle = start_below(event->type, event->parent, &event->proxy_op, event->step, &event->net);
	}
	return NCCL_SUCCESS;
}

static int start_v4(void *context, void **handle, struct profiler_event_v4 *event)
{
	if (event->type == PROFILE_COLL)
		*handle = is_ours(context) ? events_start_coll(&event->coll, event->parent, true) : NULL;
	else
		*handle = start_below(event->type, event->parent, &event->proxy_op, event->step, &event->net);
	return NCCL_SUCCESS;
}

static int start_v5(void *context, void **handle, struct profiler_event_v5 *event)
{
	*handle = NULL;
	if (event->type == PROFILE_COLL)
		*handle = is_ours(context) ? events_start_coll(&event->coll, event->group, true) : NULL;
	else if (event->type == PROFILE_COLL_API && event->coll_api.graph_captured && is_ours(context))
		job_fail("an AllReduce of gradients is captured in a CUDA graph, which is not supported");
	else if (event->type != PROFILE_COLL_API)
		*handle = start_below(event->type, event->parent, &event->proxy_op, event->step, &event->net);
	return NCCL_SUCCESS;
}

static int stop(void *handle)
{
	(void)handle;
	return NCCL_SUCCESS;
}

static int record_v3(void *handle, int state, void *arguments)
{
	const struct profiler_state_v3 *progress = arguments;

	if (state == PROFILE_SEND_REM_FIFO_WAIT && progress)
		events_announce_op(handle, progress->steps - 1);
	return NCCL_SUCCESS;
}

static int record(void *handle, int state, void *arguments)
{
	(void)arguments;
	if (state == PROFILE_SEND_PEER_WAIT)
		events_announce_step(handle);
	return NCCL_SUCCESS;
}

static int finalize(void *context)
{
	free(context);
	return NCCL_SUCCESS;
}

EXPORTED struct profiler_v3 ncclProfiler_v3 = {"Checkmate", init_v3, start_v3, stop, record_v3, finalize};
EXPORTED struct profiler_v4 ncclProfiler_v4 = {"Checkmate", init_v4, start_v4, stop, record, finalize};
EXPORTED struct profiler_v5 ncclProfiler_v5 = {"Checkmate", init_v5, start_v5, stop, record, finalize};
EXPORTED struct profiler_v6 ncclProfiler_v6 = {"Checkmate", init_v5, start_v5, stop, record, finalize};
