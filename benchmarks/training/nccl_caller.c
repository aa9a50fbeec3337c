/* SPDX-License-Identifier: Apache-2.0
 *
 * For `nccl_speed`: calls the plugin as NCCL's proxy does in an AllReduce, and sends the same bytes by plain sockets.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

#include "nccl_api.h"
#include "slicing.h"

enum { AHEAD = 4, CHANNELS_MAX = 8, SLOT = 1 << 20, WRITE = 128 << 10 }; /* WRITE is as in iperf3 */

/* NCCL spins instead, whose processor time would hide that of tags. */
static const struct timespec IDLE = {.tv_nsec = 200000};

struct caller {
	struct net_v12 *net;
	struct profiler_v6 *profiler;
	void *net_context;
	void *profiler_context;
};

static struct caller *current; /* for the callback, which has no context */

/* NCCL's answer to the net plugin: an event below the step. */
static int profiled(void **handle, int type, void *phandle, int64_t plugin, void *data)
{
	struct profiler_event_v5 event = {.type = PROFILE_NET_PLUGIN, .parent = phandle, .net = {plugin, data}};

	return type == NCCL_NET_EVENT_START ? current->profiler->start_event(current->profiler_context, handle, &event)
					    : 0;
}

/* Make a communicator. Return NULL if the plugin refuses it. */
struct caller *caller_make(const char *plugin, uint64_t comm_hash, int ranks, int rank)
{
	struct caller *made = calloc(1, sizeof(*made));
	void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
	struct net_properties_v12 properties;
	int mask;

	if (!made || !library)
		return NULL;
	made->net = dlsym(library, "ncclNetPlugin_v12");
	made->profiler = dlsym(library, "ncclProfiler_v6");
	if (!made->net || !made->profiler || made->net->init(&made->net_context, comm_hash, NULL, NULL, profiled) ||
	    made->net->get_properties(0, &properties) ||
	    made->profiler->init(&made->profiler_context, comm_hash, &mask, NULL, ranks, ranks, rank, NULL))
		return NULL;
	return made;
}

int caller_listen(struct caller *caller, void *handle, void **listening)
{
	return caller->net->listen(caller->net_context, 0, handle, listening);
}

int caller_connect(struct caller *caller, void *handle, void **comm)
{
	void *device;

	return caller->net->connect(caller->net_context, 0, handle, comm, &device);
}

int caller_accept(struct caller *caller, void *listening, void **comm)
{
	void *device;

	return caller->net->accept(listening, comm, &device);
}

/* Test the oldest requests. Return the number that are done, or -1 for an error. */
static int finish(struct caller *caller, void **requests, uint32_t from, uint32_t to)
{
	int finished = 0, done = 1, size;

	for (; from + (uint32_t)finished < to; finished++) {
		if (caller->net->test(requests[(from + (uint32_t)finished) % AHEAD], &done, &size))
			return -1;
		if (!done)
			break;
	}
	return finished;
}

static void *start(struct caller *caller, struct profiler_event_v5 event)
{
	void *handle = NULL;

	caller->profiler->start_event(caller->profiler_context, &handle, &event);
	return handle;
}

/* One channel's part in an AllReduce. */
struct channel {
	void *comm;
	void *op;
	void *step;
	void *requests[AHEAD];
	uint32_t posted, done;
	bool ended;
};

/* Post the next send if there is one and room for it. Return whether something happened, or -1 for an error. */
static int advance(struct caller *caller, const struct slicing *slicing, struct channel *channel, uint32_t number,
		   char *slots)
{
	void **request = &channel->requests[channel->posted % AHEAD];
	int finished = finish(caller, channel->requests, channel->done, channel->posted);
	struct sent sent;

	if (finished < 0)
		return -1;
	channel->done += (uint32_t)finished;
	channel->ended = slicing_send(slicing, number, channel->posted, &sent) != 0;
	if (channel->ended || channel->posted - channel->done == AHEAD)
		return finished > 0;
	if (!channel->step)
		channel->step = start(caller, (struct profiler_event_v5){.type = PROFILE_PROXY_STEP,
									 .parent = channel->op,
									 .step = (int)channel->posted});
	if (channel->step)
		caller->profiler->record_state(channel->step, PROFILE_SEND_PEER_WAIT, NULL);
	if (caller->net->isend(channel->comm, slots + channel->posted % AHEAD * SLOT, sent.count * slicing->itemsize, 0,
			       NULL, channel->step, request))
		return -1;
	if (!*request)
		return finished > 0;
	channel->step = NULL;
	channel->posted++;
	return 1;
}

/* Make all sends of this rank in an AllReduce. As in NCCL, they are in a few slots for each channel, at `data`, which
 * is the bucket's address, too. Return 0, or -1 for an error. */
int caller_send(struct caller *caller, const struct slicing *slicing, void **comms, char *data, int next)
{
	struct channel channels[CHANNELS_MAX] = {0};
	uint32_t used = slicing_used(slicing), left = used;
	struct profiler_coll coll = {.function = "AllReduce",
				     .send_buffer = data,
				     .count = slicing->elements,
				     .datatype = "ncclFloat32",
				     .channels = (uint8_t)used,
				     .algorithm = "RING",
				     .protocol = "SIMPLE"};
	void *handle = start(caller, (struct profiler_event_v5){.type = PROFILE_COLL, .coll = coll});

	current = caller;
	for (uint32_t i = 0; i < used; i++) {
		struct profiler_proxy_op op = {.channel = (uint8_t)i, .peer = next, .is_send = 1};

		channels[i].comm = comms[i];
		channels[i].op = start(
			caller, (struct profiler_event_v5){.type = PROFILE_PROXY_OP, .parent = handle, .proxy_op = op});
	}
	while (left) {
		int busy = 0;

		left = 0;
		for (uint32_t i = 0; i < used; i++) {
			int moved = advance(caller, slicing, &channels[i], i, data + i * AHEAD * SLOT);

			if (moved < 0)
				return -1;
			busy |= moved;
			left += !channels[i].ended || channels[i].done < channels[i].posted;
		}
		if (!busy)
			nanosleep(&IDLE, NULL);
	}
	return 0;
}

/* Receive the messages of the previous rank in an AllReduce, into as many slots at `room`. */
int caller_receive(struct caller *caller, const struct slicing *slicing, void **comms, char *room)
{
	size_t size = SLOT;
	struct channel channels[CHANNELS_MAX] = {0};
	uint32_t used = slicing_used(slicing), left = used;
	struct sent sent;
	int tag = 0;
	void *none = NULL;

	while (left) {
		bool busy = false;

		left = 0;
		for (uint32_t i = 0; i < used; i++) {
			struct channel *one = &channels[i];
			void *place = room + (i * AHEAD + one->posted % AHEAD) * SLOT;
			int finished = finish(caller, one->requests, one->done, one->posted);

			if (finished < 0)
				return -1;
			one->done += (uint32_t)finished;
			one->ended = slicing_send(slicing, i, one->posted, &sent) != 0;
			if (!one->ended && one->posted - one->done < AHEAD) {
				void **request = &one->requests[one->posted % AHEAD];

				if (caller->net->irecv(comms[i], 1, &place, &size, &tag, &none, &none, request))
					return -1;
				one->posted += *request != NULL;
				finished += *request != NULL;
			}
			busy |= finished > 0;
			left += !one->ended || one->done < one->posted;
		}
		if (!busy)
			nanosleep(&IDLE, NULL);
	}
	return 0;
}

int plain_send(int fd, const char *data, size_t size)
{
	while (size) {
		ssize_t sent = send(fd, data, size < WRITE ? size : WRITE, MSG_NOSIGNAL);

		if (sent < 0 && errno != EINTR)
			return -1;
		size -= sent > 0 ? (size_t)sent : 0;
	}
	return 0;
}

int plain_receive(int fd, char *room, size_t size)
{
	while (size) {
		ssize_t got = recv(fd, room, size < WRITE ? size : WRITE, 0);

		if (!got || (got < 0 && errno != EINTR))
			return -1;
		size -= got > 0 ? (size_t)got : 0;
	}
	return 0;
}
