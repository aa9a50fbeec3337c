/* SPDX-License-Identifier: Apache-2.0
 *
 * The network that NCCL loads: versions 10 to 12 over `meeting` and `stream`. Memory is the host's, the network is the
 * kernel's TCP.
 */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"
#include "meeting.h"

#define BYTES_MAX ((size_t)1 << 40)

enum { COMMS_MAX = 65536, DEFAULT_SPEED = 10000 };

static _Atomic(nccl_profiler_callback) profile;
static char name[] = "Checkmate";
static char gradients; /* its address is the context of the gradients' communicator */
static _Thread_local bool refuses; /* the communicator that this thread creates */

/* Keep NCCL's functions. A process may have several copies of NCCL, of which one makes the gradients' sends. An
 * error here would disable the plugin in the whole process, so `refused` is what refuses communicators. */
static int begin(bool gradients, nccl_logger log, nccl_profiler_callback callback)
{
	if (!atomic_load(&profile) || gradients) {
		job_use_logger(log);
		atomic_store(&profile, callback);
	}
	return NCCL_SUCCESS;
}

static int init_v10(nccl_logger log, nccl_profiler_callback callback)
{
	return begin(job_expects(), log, callback);
}

static int init_v11(void **context, uint64_t comm_hash, void *config, nccl_logger log, nccl_profiler_callback callback)
{
	(void)config;
	job_meet(comm_hash);
	refuses = !job_is_ours(comm_hash);
	*context = refuses ? NULL : &gradients;
	return begin(!refuses, log, callback);
}

/* Return whether the communicator that this thread creates is not the gradients'. NCCL asks for properties right after
 * init, and tries its next network if that fails. */
static bool refused(bool named)
{
	bool refusing = named ? refuses : !job_present() || !job_expects();

	refuses = false; /* the communicator may be used in the same thread later */
	if (refusing)
		job_log(NCCL_LOG_INFO, "a communicator that is not the gradients' keeps another network");
	return refusing;
}

static int devices(int *count)
{
	*count = 1;
	return NCCL_SUCCESS;
}

static void describe(struct net_properties_common *common)
{
	const struct nccl_job *job = job_now();
	static char pci[PATH_MAX];
	char path[64];

	snprintf(path, sizeof(path), "/sys/class/net/%s/device", job->interface);
	*common = (struct net_properties_common){
		.name = job->interface,
		.pci_path = realpath(path, pci),
		.guid = job->address,
		.pointers = NCCL_PTR_HOST,
		.speed = job->speed > 0 ? job->speed : DEFAULT_SPEED,
		.comms_max = COMMS_MAX,
		.receives_max = 1,
	};
}

#define DEFINE_PROPERTIES(VERSION, NAMED, ...)                                                                         \
	static int properties_v##VERSION(int device, struct net_properties_v##VERSION *properties)                     \
	{                                                                                                              \
		if (device || refused(NAMED))                                                                          \
			return NCCL_INTERNAL_ERROR;                                                                    \
		*properties = (struct net_properties_v##VERSION){                                                      \
			.devices = 1, .p2p_bytes_max = BYTES_MAX, .collective_bytes_max = BYTES_MAX, __VA_ARGS__};     \
		describe(&properties->common);                                                                         \
		return NCCL_SUCCESS;                                                                                   \
	}

DEFINE_PROPERTIES(10, false)
DEFINE_PROPERTIES(11, true, .multi_request_max = 1)
DEFINE_PROPERTIES(12, true, .multi_request_max = 1, .rail = -1, .plane = -1)

static int listen_v10(int device, void *handle, void **comm)
{
	struct listening *listening = NULL;
	int result = meeting_listen(handle, &listening);

	(void)device;
	*comm = listening;
	return result;
}

static int listen_v11(void *context, int device, void *handle, void **comm)
{
	(void)context;
	return listen_v10(device, handle, comm);
}

static int connect_any(void *handle, bool may_tag, void **comm)
{
	struct stream *stream = NULL;
	int result = meeting_connect(handle, may_tag, &stream);

	*comm = stream;
	return result;
}

/* This version does not name the communicator: each of its sends decides whether it is tagged. */
static int connect_v10(int device, void *config, void *handle, void **comm, void **device_comm)
{
	(void)device, (void)config, (void)device_comm;
	return connect_any(handle, true, comm);
}

static int connect_v11(void *context, int device, void *handle, void **comm, void **device_comm)
{
	(void)device, (void)device_comm;
	return connect_any(handle, context == &gradients, comm);
}

static int accept_any(void *listening, void **comm, void **device_comm)
{
	struct stream *stream = NULL;
	int result = meeting_accept(listening, &stream);

	(void)device_comm;
	*comm = stream;
	return result;
}

static int reg_mr(void *comm, void *data, size_t size, int type, void **handle)
{
	(void)comm, (void)data, (void)size;
	*handle = NULL;
	return type == NCCL_PTR_HOST ? NCCL_SUCCESS : NCCL_INTERNAL_ERROR;
}

static int dereg_mr(void *comm, void *handle)
{
	(void)comm, (void)handle;
	return NCCL_SUCCESS;
}

static int isend(void *comm, void *data, size_t size, int tag, void *mr, void *phandle, void **request)
{
	struct stream *stream = comm;
	struct send_mark mark = events_take_announced();
	nccl_profiler_callback tell = atomic_load(&profile);
	void *event = NULL;

	(void)tag, (void)mr;
	*request = NULL;
	if (atomic_load(&stream->error))
		return NCCL_REMOTE_ERROR;
	if (phandle && tell)
		tell(&event, NCCL_NET_EVENT_START, phandle, PLUGIN_ID, &mark);
	*request = stream_post(stream, data, size, &mark);
	return NCCL_SUCCESS;
}

static int irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **mrs, void **phandles, void **request)
{
	struct stream *stream = comm;

	(void)tags, (void)mrs, (void)phandles;
	*request = NULL;
	if (n != 1)
		stream_fail(stream, EINVAL);
	if (atomic_load(&stream->error))
		return NCCL_REMOTE_ERROR;
	*request = stream_post(stream, data[0], sizes[0], NULL);
	return NCCL_SUCCESS;
}

static int iflush(void *comm, int n, void **data, int *sizes, void **mrs, void **request)
{
	(void)comm, (void)n, (void)data, (void)sizes, (void)mrs;
	*request = NULL;
	return NCCL_INTERNAL_ERROR; /* only for memory of GPUs */
}

static int test(void *handle, int *done, int *sizes)
{
	struct request *request = handle;
	struct stream *stream = request->stream;
	size_t size = 0;

	*done = stream_test(request, &size);
	if (*done && sizes)
		*sizes = (int)size;
	return !*done && atomic_load(&stream->error) ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
}

static int close_stream(void *comm)
{
	if (comm)
		stream_close(comm);
	return NCCL_SUCCESS;
}

static int close_listen(void *comm)
{
	return meeting_close(comm);
}

static int finalize(void *context)
{
	(void)context;
	return NCCL_SUCCESS;
}

#define SHARED_FUNCTIONS                                                                                               \
	.devices = devices, .accept = accept_any, .reg_mr = reg_mr, .dereg_mr = dereg_mr, .isend = isend,              \
	.irecv = irecv, .iflush = iflush, .test = test, .close_send = close_stream, .close_recv = close_stream,        \
	.close_listen = close_listen

EXPORTED struct net_v10 ncclNetPlugin_v10 = {name,
					     .init = init_v10,
					     .get_properties = properties_v10,
					     .listen = listen_v10,
					     .connect = connect_v10,
					     SHARED_FUNCTIONS};
EXPORTED struct net_v11 ncclNetPlugin_v11 = {name,
					     .init = init_v11,
					     .get_properties = properties_v11,
					     .listen = listen_v11,
					     .connect = connect_v11,
					     SHARED_FUNCTIONS,
					     .finalize = finalize};
EXPORTED struct net_v12 ncclNetPlugin_v12 = {name,
					     .init = init_v11,
					     .get_properties = properties_v12,
					     .listen = listen_v11,
					     .connect = connect_v11,
					     SHARED_FUNCTIONS,
					     .finalize = finalize};
