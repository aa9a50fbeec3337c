/* SPDX-License-Identifier: Apache-2.0
 *
 * One direction of a TCP connection of NCCL's, with a thread that sends or receives its messages in order.
 */
#ifndef CHECKMATE_NCCL_STREAM_H
#define CHECKMATE_NCCL_STREAM_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "events.h"
#include "frames.h"
#include "nccl_api.h"
#include "tagging.h"

enum request_state { REQUEST_FREE, REQUEST_QUEUED, REQUEST_DONE };

struct request {
	struct stream *stream;
	_Atomic int state;
	struct message message;
};

struct stream {
	int fd;
	bool sends;
	struct sockaddr_in peer;
	struct tagging tagging;
	struct send_order order;
	struct frame_reader reader;
	struct request requests[NCCL_NET_REQUESTS_MAX];
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	uint64_t posted; /* by NCCL */
	uint64_t done; /* by the thread */
	_Atomic bool closing;
	struct stream *next; /* of the sending streams */
	uint32_t epoch; /* of the job */
	_Atomic int error; /* errno of what broke it; stays */
};

/* Begin with a connected, blocking socket, which the stream owns, and with what was tagged on it, which moves into the
 * stream; NULL for nothing. Return NULL without memory or a thread for it. */
struct stream *stream_open(int fd, bool sends, struct tagging *tagging);
/* Post a message. Return its request, or NULL if too many are in progress. */
struct request *stream_post(struct stream *stream, void *data, size_t size, const struct send_mark *mark);
/* Break the stream for good, because some versions of NCCL ignore errors and go on. */
void stream_fail(struct stream *stream, int error);
/* Return whether a request is done, and free it then. */
bool stream_test(struct request *request, size_t *size);
void stream_close(struct stream *stream);

#endif
