/* SPDX-License-Identifier: Apache-2.0
 *
 * The tuner that NCCL loads: versions 4 to 6. The gradients' AllReduces use the ring, the SIMPLE protocol and at most
 * the job's channels. Other communicators keep NCCL's choice.
 */
#include "job.h"

static char gradients; /* its address is the context of the gradients' communicator */

static int init_v4(size_t ranks, size_t nodes, nccl_logger log, void **context)
{
	(void)nodes, (void)log;
	/* This version does not name the communicator, so its creation must be announced and its size must fit. */
	*context = job_tags() && job_expects() && ranks == job_now()->ranks ? &gradients : NULL;
	return NCCL_SUCCESS;
}

static int init_v5(void **context, uint64_t comm_hash, size_t ranks, size_t nodes, nccl_logger log, void *domains,
		   void *constants)
{
	(void)ranks, (void)nodes, (void)log, (void)domains, (void)constants;
	*context = job_tags() && job_is_ours(comm_hash) ? &gradients : NULL;
	return NCCL_SUCCESS;
}

static int coll_info(void *context, int function, size_t nbytes, int pipelined, float **costs, int algorithms,
		     int protocols, int registered, int *channels)
{
	float *cost = (float *)costs; /* one table, [algorithm][protocol] */

	(void)nbytes, (void)pipelined, (void)registered;
	if (context != &gradients || function != TUNER_ALL_REDUCE || algorithms <= TUNER_RING ||
	    protocols <= TUNER_SIMPLE)
		return NCCL_SUCCESS;
	if (cost[TUNER_RING * protocols + TUNER_SIMPLE] < 0) {
		job_fail("NCCL may not use the ring with the SIMPLE protocol: unset NCCL_ALGO and NCCL_PROTO");
		return NCCL_SUCCESS; /* an error would fail the AllReduce */
	}
	for (int algorithm = 0; algorithm < algorithms; algorithm++)
		for (int protocol = 0; protocol < protocols; protocol++)
			if (algorithm != TUNER_RING || protocol != TUNER_SIMPLE)
				cost[algorithm * protocols + protocol] = TUNER_IGNORED;
	cost[TUNER_RING * protocols + TUNER_SIMPLE] = 0.0f;
	*channels = (int)job_now()->channels;
	return NCCL_SUCCESS;
}

static int finalize(void *context)
{
	(void)context;
	return NCCL_SUCCESS;
}

EXPORTED struct tuner_v4 ncclTunerPlugin_v4 = {"Checkmate", init_v4, coll_info, finalize};
EXPORTED struct tuner_v5 ncclTunerPlugin_v5 = {"Checkmate", init_v5, coll_info, finalize};
EXPORTED struct tuner_v6 ncclTunerPlugin_v6 = {"Checkmate", init_v5, coll_info, finalize, NULL};
