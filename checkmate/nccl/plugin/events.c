/* SPDX-License-Identifier: Apache-2.0 */
#include "events.h"

#include <stdatomic.h>
#include <string.h>

#include "calibration.h"
#include "job.h"
#include "slicing.h"

enum { GROUPS = 1024, COLLS = 4096, OPS = 16384, STEPS_AHEAD = 16 };

enum kind { KIND_GROUP = 1, KIND_COLL, KIND_OP, KIND_STEP };

struct event_group {
	enum kind kind;
	atomic_uint colls;
};

struct event_coll {
	enum kind kind;
	int bucket;
	_Atomic uint64_t serial; /* of the gradients' collectives in this process */
	uint32_t epoch;
	bool calibrates;
	uint32_t shadow_id;
	struct slicing slicing;
};

struct event_step {
	enum kind kind;
	struct event_op *op;
	uint32_t number;
};

struct event_op {
	enum kind kind;
	struct event_coll *coll;
	uint64_t serial; /* of that collective: its record may be another's by now */
	uint32_t channel;
	bool sends;
	struct event_step steps[STEPS_AHEAD];
};

static struct event_group groups[GROUPS];
static struct event_coll colls[COLLS];
static struct event_op ops[OPS];
static _Atomic uint64_t groups_begun, colls_begun, ops_begun;
static _Thread_local struct send_mark announced;

static bool is_a(const void *handle, enum kind kind)
{
	return handle && *(const enum kind *)handle == kind;
}

static uint32_t itemsize_of(const char *datatype)
{
	static const struct {
		const char *name;
		uint32_t bytes;
	} types[] = {
		{"ncclFloat32", 4}, {"ncclFloat16", 2}, {"ncclBfloat16", 2}, {"ncclFloat64", 8}, {"ncclInt32", 4},
		{"ncclUint32", 4},  {"ncclInt64", 8},	{"ncclUint64", 8},   {"ncclInt8", 1},
	};

	for (size_t i = 0; datatype && i < sizeof(types) / sizeof(*types); i++)
		if (!strcmp(datatype, types[i].name))
			return types[i].bytes;
	return 0;
}

static bool equal(const char *text, const char *expected)
{
	return text && !strcmp(text, expected);
}

static struct slicing slicing_of(const struct nccl_bucket *bucket)
{
	const struct nccl_job *job = job_now();

	return (struct slicing){
		.elements = bucket->elements,
		.itemsize = bucket->itemsize,
		.sizes = job->sizes,
		.channels = job->channels,
		.allowed = bucket->allowed ? bucket->allowed : job->channels,
		.ranks = job->ranks,
		.index = job->rank,
	};
}

void *events_start_group(void)
{
	struct event_group *group = &groups[atomic_fetch_add(&groups_begun, 1) % GROUPS];

	group->kind = KIND_GROUP;
	atomic_store(&group->colls, 0);
	return group;
}

/* Count a collective in its group. Return whether it is the AllReduce of a bucket as it must be; name what is not
 * right. */
static bool claim(const struct profiler_coll *coll, void *group, int number, uint32_t itemsize, uint32_t channels)
{
	if (number < 0)
		job_fail("an AllReduce of %zu elements at %p is not that of a bucket", coll->count, coll->send_buffer);
	else if (is_a(group, KIND_GROUP) && atomic_fetch_add(&((struct event_group *)group)->colls, 1))
		job_fail("bucket %d is reduced in a group with another one: launch each alone", number);
	else if (!equal(coll->algorithm, "RING") || !equal(coll->protocol, "SIMPLE"))
		job_fail("bucket %d uses algorithm %s and protocol %s, not RING and SIMPLE: unset NCCL_ALGO and "
			 "NCCL_PROTO",
			 number, coll->algorithm ? coll->algorithm : "?", coll->protocol ? coll->protocol : "?");
	else if (itemsize_of(coll->datatype) != itemsize)
		job_fail("bucket %d has elements of %u bytes, and its AllReduce has %s", number, itemsize,
			 coll->datatype ? coll->datatype : "an unknown type");
	else if (coll->channels != channels)
		job_fail("bucket %d has %u channels, and not %u: another tuner, or fewer channels in the communicator",
			 number, coll->channels, channels);
	else
		return true;
	return false;
}

void *events_start_coll(const struct profiler_coll *coll, void *group, bool channels_are_used)
{
	struct nccl_bucket bucket = {.itemsize = 1};
	struct event_coll *event;
	struct slicing slicing;
	uint64_t serial;
	int number;

	if (!job_tags() || !equal(coll->function, "AllReduce"))
		return NULL;
	number = job_find_bucket(coll->send_buffer, coll->count, &bucket);
	slicing = slicing_of(&bucket);
	if (!claim(coll, group, number, bucket.itemsize, channels_are_used ? slicing_used(&slicing) : slicing.allowed))
		return NULL;
	job_set_used(number, &bucket, slicing_used(&slicing));
	serial = atomic_fetch_add(&colls_begun, 1);
	event = &colls[serial % COLLS];
	*event = (struct event_coll){
		.kind = KIND_COLL,
		.bucket = number,
		.serial = serial,
		.epoch = job_epoch(),
		.calibrates = calibration_runs(),
		.shadow_id = bucket.shadow_id,
		.slicing = slicing,
	};
	return event;
}

void *events_start_op(void *parent, const struct profiler_proxy_op *op)
{
	const struct nccl_job *job = job_now();
	struct event_op *event;

	if (!is_a(parent, KIND_COLL))
		return NULL;
	if (op->is_send && (uint32_t)op->peer != (job->rank + 1) % job->ranks) {
		job_fail("channel %u sends to rank %d, so the ring is not in the order of ranks: use one rank for "
			 "each node",
			 op->channel, op->peer);
		return NULL;
	}
	event = &ops[atomic_fetch_add(&ops_begun, 1) % OPS];
	event->kind = KIND_OP;
	event->coll = parent;
	event->serial = event->coll->serial;
	event->channel = op->channel;
	event->sends = op->is_send;
	return event;
}

void *events_start_step(void *parent, int step)
{
	struct event_op *op = parent;
	struct event_step *event;

	if (!is_a(parent, KIND_OP) || step < 0)
		return NULL;
	event = &op->steps[step % STEPS_AHEAD];
	*event = (struct event_step){KIND_STEP, op, (uint32_t)step};
	return event;
}

void events_start_net(void *parent, const struct profiler_net *net)
{
	if (net->plugin == PLUGIN_ID && net->data && is_a(parent, KIND_STEP))
		((struct send_mark *)net->data)->named = parent;
}

void events_announce_step(void *handle)
{
	const struct event_step *step = handle;

	if (is_a(handle, KIND_STEP))
		announced = (struct send_mark){.op = step->op, .step = step->number};
}

void events_announce_op(void *handle, int step)
{
	if (is_a(handle, KIND_OP) && step >= 0)
		announced = (struct send_mark){.op = handle, .step = (uint32_t)step, .by_op = true};
}

struct send_mark events_take_announced(void)
{
	struct send_mark mark = announced;

	announced = (struct send_mark){0};
	return mark;
}

/* Return whether a send is the one that NCCL must make after the connection's last one. */
static bool in_order(const struct event_coll *coll, uint32_t step, const struct send_order *order)
{
	if (!order->any || coll->serial > order->serial)
		return step == 0;
	return coll->serial == order->serial && step == order->step + 1;
}

/* Return whether a send is the one that NCCL must make now, and which elements it has; name what is not right. */
static bool foreseen(const struct send_mark *mark, size_t nbytes, const struct send_order *order, struct sent *sent)
{
	const struct event_coll *coll = mark->op->coll;
	uint32_t channel = mark->op->channel, itemsize = coll->slicing.itemsize;

	if (!mark->by_op && (mark->named->op != mark->op || mark->named->number != mark->step))
		job_fail("NCCL names step %u for a send, and has announced step %u", mark->named->number, mark->step);
	else if (!in_order(coll, mark->step, order))
		job_fail("bucket %d, channel %u: step %u follows step %u", coll->bucket, channel, mark->step,
			 order->step);
	else if (slicing_send(&coll->slicing, channel, mark->step, sent))
		job_fail("bucket %d, channel %u has no step %u", coll->bucket, channel, mark->step);
	else if (sent->count * itemsize != nbytes)
		job_fail("bucket %d, channel %u, step %u: NCCL sends %zu bytes, and not %llu", coll->bucket, channel,
			 mark->step, nbytes, (unsigned long long)sent->count * itemsize);
	else
		return true;
	return false;
}

/* The schedule of tags (design, section 3): rank 0 tags its sends of round 0, and the last rank those of all rounds. */
static bool is_tagged(int round)
{
	const struct nccl_job *job = job_now();

	return job->rank == job->ranks - 1 ? round >= 0 : job->rank == 0 && round == 0;
}

struct send_decision events_decide(const struct send_mark *mark, const void *data, size_t nbytes,
				   struct send_order *order)
{
	struct send_decision decision = {0};
	const struct event_coll *coll;
	struct sent sent;

	if (!mark->op && mark->named)
		job_fail("NCCL names step %u for a send, and has announced none", mark->named->number);
	if (!mark->op || (!mark->by_op && !mark->named) || !mark->op->sends || !job_tags())
		return decision;
	coll = mark->op->coll;
	if (coll->serial != mark->op->serial) {
		job_fail("NCCL sends for collective %llu, and has begun %d since", (unsigned long long)mark->op->serial,
			 COLLS);
		return decision;
	}
	if (coll->epoch != job_epoch() || !foreseen(mark, nbytes, order, &sent))
		return decision;
	*order = (struct send_order){coll->serial, mark->step, true};
	decision.epoch = coll->epoch;
	decision.channel = mark->op->channel;
	decision.shadow_id = coll->shadow_id;
	if (coll->calibrates) {
		if (sent.round >= 0)
			calibration_compare(decision.channel, coll->shadow_id, (uint32_t)coll->bucket, mark->step,
					    &sent, data);
		return decision;
	}
	decision.tagged =
		sent.count && is_tagged(sent.round) &&
		job_add_tagged(decision.epoch, decision.channel, decision.shadow_id, nbytes, &decision.position);
	return decision;
}
