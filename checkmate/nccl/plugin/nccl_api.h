/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's plugin interfaces, as far as this library uses them: net 10 to 12, profiler 3 to 6, tuner 4 to 6.
 * Declared from their documentation (NCCL's plugins/net, plugins/profiler and plugins/tuner). Fields that are not used
 * are kept where their size or order matters.
 */
#ifndef CHECKMATE_NCCL_API_H
#define CHECKMATE_NCCL_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* ncclResult_t */
enum nccl_result { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2, NCCL_INTERNAL_ERROR = 3, NCCL_REMOTE_ERROR = 6 };

enum { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum { NCCL_SUBSYS_NET = 16 };
enum { NCCL_PTR_HOST = 1 };
enum { NCCL_NET_HANDLE_MAX = 128, NCCL_NET_REQUESTS_MAX = 32 };

typedef void (*nccl_logger)(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);

/* Tells the profiler of an event of a net plugin; `handle` belongs to the profiler. */
typedef int (*nccl_profiler_callback)(void **handle, int type, void *phandle, int64_t plugin, void *data);
enum { NCCL_NET_EVENT_START = 0 };

/* Net: properties of a device. Versions differ in what follows `device_version`. */
struct net_properties_common {
	const char *name;
	char *pci_path;
	uint64_t guid;
	int pointers;
	int registration_is_global;
	int force_flush;
	int speed; /* Mbit/s */
	int port;
	float latency;
	int comms_max;
	int receives_max;
	int device_type;
	int device_version;
};

struct net_properties_v10 {
	struct net_properties_common common;
	int devices;
	int device[4];
	size_t p2p_bytes_max;
	size_t collective_bytes_max;
};

struct net_properties_v11 {
	struct net_properties_common common;
	int devices;
	int device[4];
	size_t p2p_bytes_max;
	size_t collective_bytes_max;
	int multi_request_max;
};

struct net_properties_v12 {
	struct net_properties_common common;
	int devices;
	int device[8];
	size_t p2p_bytes_max;
	size_t collective_bytes_max;
	int multi_request_max;
	int16_t rail;
	int16_t plane;
};

/* The functions that are the same in all three versions. */
#define NET_FUNCTIONS                                                                                                  \
	int (*reg_mr)(void *comm, void *data, size_t size, int type, void **handle);                                   \
	int (*reg_mr_dmabuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **handle);   \
	int (*dereg_mr)(void *comm, void *handle);                                                                     \
	int (*isend)(void *comm, void *data, size_t size, int tag, void *mr, void *phandle, void **request);           \
	int (*irecv)(void *comm, int n, void **data, size_t *sizes, int *tags, void **mrs, void **phandles,            \
		     void **request);                                                                                  \
	int (*iflush)(void *comm, int n, void **data, int *sizes, void **mrs, void **request);                         \
	int (*test)(void *request, int *done, int *sizes);                                                             \
	int (*close_send)(void *comm);                                                                                 \
	int (*close_recv)(void *comm);                                                                                 \
	int (*close_listen)(void *comm);                                                                               \
	int (*get_device_mr)(void *comm, void *mr, void **device_mr);                                                  \
	int (*irecv_consumed)(void *comm, int n, void *request);                                                       \
	int (*make_virtual_device)(int *device, void *properties);

struct net_v10 {
	const char *name;
	int (*init)(nccl_logger log, nccl_profiler_callback profile);
	int (*devices)(int *count);
	int (*get_properties)(int device, struct net_properties_v10 *properties);
	int (*listen)(int device, void *handle, void **comm);
	int (*connect)(int device, void *config, void *handle, void **comm, void **device_comm);
	int (*accept)(void *listening, void **comm, void **device_comm);
	NET_FUNCTIONS
};

#define NET_WITH_CONTEXT(VERSION)                                                                                      \
	struct net_v##VERSION {                                                                                        \
		const char *name;                                                                                      \
		int (*init)(void **context, uint64_t comm_hash, void *config, nccl_logger log,                         \
			    nccl_profiler_callback profile);                                                           \
		int (*devices)(int *count);                                                                            \
		int (*get_properties)(int device, struct net_properties_v##VERSION *properties);                       \
		int (*listen)(void *context, int device, void *handle, void **comm);                                   \
		int (*connect)(void *context, int device, void *handle, void **comm, void **device_comm);              \
		int (*accept)(void *listening, void **comm, void **device_comm);                                       \
		NET_FUNCTIONS                                                                                          \
		int (*finalize)(void *context);                                                                        \
		int (*set_attributes)(void *context, void *attributes);                                                \
	}

NET_WITH_CONTEXT(11);
NET_WITH_CONTEXT(12);

/* Profiler: kinds of events, and the states right before a send: of an operation in version 3, of a step later. */
enum {
	PROFILE_GROUP = 1 << 0,
	PROFILE_COLL = 1 << 1,
	PROFILE_PROXY_OP = 1 << 3,
	PROFILE_PROXY_STEP = 1 << 4,
	PROFILE_NET_PLUGIN = 1 << 7,
	PROFILE_COLL_API = 1 << 9,
};
enum { PROFILE_SEND_REM_FIFO_WAIT = 1, PROFILE_SEND_PEER_WAIT = 20 };

/* A collective, in the part of it that does not differ. `channels` is the maximum before version 4. */
struct profiler_coll {
	uint64_t sequence;
	const char *function;
	const void *send_buffer;
	void *receive_buffer;
	size_t count;
	int root;
	const char *datatype;
	uint8_t channels;
	uint8_t warps;
	const char *algorithm;
	const char *protocol;
};

struct profiler_proxy_op {
	pid_t pid;
	uint8_t channel;
	int peer;
	int steps;
	int chunk_bytes;
	int is_send;
};

struct profiler_net {
	int64_t plugin;
	void *data;
};

struct profiler_coll_api {
	const char *function;
	size_t count;
	const char *datatype;
	int root;
	void *stream;
	bool graph_captured;
};

/* Of a proxy operation, with its state in version 3. `steps` includes the one that begins. */
struct profiler_state_v3 {
	size_t transferred;
	int steps;
};

struct profiler_event_v3 {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct {
			const char *name;
			uint64_t comm_hash;
			struct profiler_coll coll;
		};
		struct profiler_proxy_op proxy_op;
		int step;
		struct profiler_net net;
	};
};

struct profiler_event_v4 {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct profiler_coll coll;
		struct profiler_proxy_op proxy_op;
		int step;
		struct profiler_net net;
	};
};

/* Versions 5 and 6; what they add is not used. */
struct profiler_event_v5 {
	uint64_t type;
	void *parent;
	int rank;
	union {
		struct profiler_coll_api coll_api;
		struct {
			struct profiler_coll coll;
			void *group;
		};
		struct profiler_proxy_op proxy_op;
		int step;
		struct profiler_net net;
	};
};

#define PROFILER(VERSION, EVENT, ...)                                                                                  \
	struct profiler_v##VERSION {                                                                                   \
		const char *name;                                                                                      \
		int (*init)(__VA_ARGS__);                                                                              \
		int (*start_event)(void *context, void **handle, struct EVENT *event);                                 \
		int (*stop_event)(void *handle);                                                                       \
		int (*record_state)(void *handle, int state, void *arguments);                                         \
		int (*finalize)(void *context);                                                                        \
	}

PROFILER(3, profiler_event_v3, void **context, int *mask);
PROFILER(4, profiler_event_v4, void **context, int *mask, const char *name, uint64_t comm_hash, int nodes, int ranks,
	 int rank, nccl_logger log);
PROFILER(5, profiler_event_v5, void **context, uint64_t comm_hash, int *mask, const char *name, int nodes, int ranks,
	 int rank, nccl_logger log);
PROFILER(6, profiler_event_v5, void **context, uint64_t comm_hash, int *mask, const char *name, int nodes, int ranks,
	 int rank, nccl_logger log);

/* Tuner. */
enum { TUNER_ALL_REDUCE = 4, TUNER_RING = 1, TUNER_SIMPLE = 2 };
#define TUNER_IGNORED -1.0f

#define TUNER_COLL_INFO                                                                                                \
	int (*coll_info)(void *context, int function, size_t nbytes, int pipelined, float **costs, int algorithms,     \
			 int protocols, int registered, int *channels);

struct tuner_v4 {
	const char *name;
	int (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
	TUNER_COLL_INFO
	int (*destroy)(void *context);
};

#define TUNER_INIT                                                                                                     \
	int (*init)(void **context, uint64_t comm_hash, size_t ranks, size_t nodes, nccl_logger log, void *domains,    \
		    void *constants);

struct tuner_v5 {
	const char *name;
	TUNER_INIT
	TUNER_COLL_INFO
	int (*finalize)(void *context);
};

struct tuner_v6 {
	const char *name;
	TUNER_INIT
	TUNER_COLL_INFO
	int (*finalize)(void *context);
	int (*chunk_size)(void *context, int function, size_t nbytes, int algorithm, int protocol, int channels,
			  size_t *bytes);
};

#endif
