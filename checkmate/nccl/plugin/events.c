/* SPDX-License-Identifier: Apache-2.0 */
#include "events.h"

#include <stdatomic.h>
#include <string.h>

#include "job.h"
#include "slicing.h"

enum { COLLS = 4096, OPS = 16384, STEPS_AHEAD = 16 };

enum kind { KIND_COLL = 1, KIND_OP, KIND_STEP };

struct event_coll {
	enum kind kind;
	int bucket;
	uint64_t serial; /* of the gradients' collectives in this process */
	struct slicing slicing;
	uint32_t shadow_id;
};

struct event_step {
	enum kind kind;
	struct event_op *op;
	uint32_t step;
};

struct event_op {
	enum kind kind;
	struct event_coll *coll;
	uint32_t channel;
	bool sends;
	struct event_step steps[STEPS_AHEAD];
};

static struct event_coll colls[COLLS];
static struct event_op ops[OPS];
static _Atomic uint64_t colls_begun, ops_begun;
static _Thread_local struct event_step *waiting; /* the step that has entered SendPeerWait in this thread */

static bool is_a(const void *handle, enum kind kind)
{
	return handle && *(const enum kind *)handle == kind;
}

static uint32_t itemsize_of(const char *datatype)
{
	static const struct {
		const char *name;
		uint32_t bytes;
	} known[] = {
		{"ncclFloat32", 4}, {"ncclFloat16", 2}, {"ncclBfloat16", 2}, {"ncclFloat64", 8}, {"ncclUint32", 4},
	};

	for (size_t i = 0; datatype && i < sizeof(known) / sizeof(*known); i++)
		if (!strcmp(datatype, known[i].name))
			return known[i].bytes;
	return 0;
}

static bool equal(const char *text, const char *expected)
{
	return text && !strcmp(text, expected);
}

static struct slicing slicing_of(const struct nccl_bucket *bucket)
{
	return (struct slicing){
		.elements = bucket->elements,
		.itemsize = bucket->itemsize,
		.cell = job.cell,
		.buffer = job.buffer,
		.channels = job.channels,
		.allowed = bucket->allowed ? bucket->allowed : job.channels,
		.ranks = job.ranks,
		.index = job.rank,
	};
}

void *start_coll(uint64_t comm_hash, const struct profiler_coll *coll, bool channels_are_used)
{
	struct nccl_bucket *bucket;
	struct event_coll *made;
	struct slicing slicing;
	uint32_t expected;
	int number;

	if (!job_tags() || !job_is_ours(comm_hash) || !equal(coll->function, "AllReduce"))
		return NULL;
	number = job_bucket_of(coll->send_buffer, coll->count);
	if (number < 0) {
		job_fail("an AllReduce of %zu elements at %p is not that of a bucket", coll->count, coll->send_buffer);
		return NULL;
	}
	bucket = job_bucket(number);
	if (!equal(coll->algorithm, "RING") || !equal(coll->protocol, "SIMPLE")) {
		job_fail("bucket %d uses algorithm %s and protocol %s, not RING and SIMPLE: unset NCCL_ALGO and "
			 "NCCL_PROTO", number, coll->algorithm ? coll->algorithm : "?", coll->protocol ? coll->protocol : "?");
		return NULL;
	}
	if (itemsize_of(coll->datatype) != bucket->itemsize) {
		job_fail("bucket %d has elements of %u bytes, and its AllReduce has %s", number, bucket->itemsize,
			 coll->datatype ? coll->datatype : "an unknown type");
		return NULL;
	}
	slicing = slicing_of(bucket);
	expected = channels_are_used ? slicing_used(&slicing) : slicing.allowed;
	if (coll->channels != expected) {
		job_fail("bucket %d has %u channels, and not %u: another tuner, or fewer channels in the communicator",
			 number, coll->channels, expected);
		return NULL;
	}
	bucket->used = slicing_used(&slicing);
	made = &colls[atomic_fetch_add(&colls_begun, 1) % COLLS];
	*made = (struct event_coll){
		.kind = KIND_COLL,
		.bucket = number,
		.serial = atomic_load(&colls_begun),
		.shadow_id = bucket->shadow_id,
		.slicing = slicing,
	};
	return made;
}

void *start_op(void *parent, const struct profiler_proxy_op *op)
{
	struct event_op *made;

	if (!is_a(parent, KIND_COLL))
		return NULL;
	if (op->is_send && (uint32_t)op->peer != (job.rank + 1) % job.ranks) {
		job_fail("channel %u sends to rank %d, so the ring is not in the order of ranks: use one rank for "
			 "each node", op->channel, op->peer);
		return NULL;
	}
	made = &ops[atomic_fetch_add(&ops_begun, 1) % OPS];
	made->kind = KIND_OP;
	made->coll = parent;
	made->channel = op->channel;
	made->sends = op->is_send;
	return made;
}

void *start_step(void *parent, int step)
{
	struct event_op *op = parent;
	struct event_step *made;

	if (!is_a(parent, KIND_OP) || step < 0)
		return NULL;
	made = &op->steps[step % STEPS_AHEAD];
	*made = (struct event_step){KIND_STEP, op, (uint32_t)step};
	return made;
}

void start_net(void *parent, const struct profiler_net *net)
{
	if (net->plugin == PLUGIN_ID && net->data && is_a(parent, KIND_STEP))
		((struct send_mark *)net->data)->step = parent;
}

void record_state(void *handle, int state)
{
	if (state == PROFILE_SEND_PEER_WAIT && is_a(handle, KIND_STEP))
		waiting = handle;
}

/* Return whether a send is the one that NCCL must make after the connection's last one. */
static bool in_order(const struct event_coll *coll, const struct event_step *step, const struct send_order *order)
{
	if (!order->any || coll->serial > order->serial)
		return step->step == 0;
	return coll->serial == order->serial && step->step == order->step + 1;
}

struct send_decision decide(const struct send_mark *mark, size_t nbytes, struct send_order *order)
{
	struct send_decision decision = {0};
	const struct event_step *step = mark->step;
	const struct event_coll *coll;
	struct sent sent;

	if (!step || !step->op->sends || !job_tags())
		return decision;
	coll = step->op->coll;
	decision.channel = step->op->channel;
	if (waiting && waiting != step) {
		job_fail("NCCL names step %u for a send, and waits for its peer in step %u", step->step, waiting->step);
	} else if (!in_order(coll, step, order)) {
		job_fail("bucket %d, channel %u: step %u follows step %u", coll->bucket, decision.channel, step->step,
			 order->step);
	} else if (slicing_send(&coll->slicing, decision.channel, step->step, &sent)) {
		job_fail("bucket %d, channel %u has no step %u", coll->bucket, decision.channel, step->step);
	} else if (sent.count * coll->slicing.itemsize != nbytes) {
		job_fail("bucket %d, channel %u, step %u: NCCL sends %zu bytes, and not %llu", coll->bucket,
			 decision.channel, step->step, nbytes,
			 (unsigned long long)sent.count * coll->slicing.itemsize);
	} else {
		*order = (struct send_order){coll->serial, step->step, true};
		decision.tagged = sent.count && (sent.round == 0 ? job.rank == 0 || job.rank == job.ranks - 1 :
						 sent.round > 0 && job.rank == job.ranks - 1);
		decision.shadow_id = coll->shadow_id;
		decision.position = job_position(decision.channel, decision.shadow_id);
	}
	if (decision.tagged)
		job_add_tagged(decision.channel, decision.shadow_id, nbytes);
	return decision;
}
