/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "job.h"

enum { HEADER = 8, IDLE_SECONDS = 1 };

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *senders;

void streams_acknowledge(void)
{
	pthread_mutex_lock(&list_lock);
	for (struct stream *stream = senders; stream; stream = stream->next)
		tagging_acknowledge(&stream->tagging);
	pthread_mutex_unlock(&list_lock);
}

static void list_add(struct stream *stream)
{
	pthread_mutex_lock(&list_lock);
	stream->next = senders;
	senders = stream;
	pthread_mutex_unlock(&list_lock);
}

static void list_remove(struct stream *stream)
{
	struct stream **at = &senders;

	pthread_mutex_lock(&list_lock);
	while (*at && *at != stream)
		at = &(*at)->next;
	if (*at)
		*at = stream->next;
	pthread_mutex_unlock(&list_lock);
}

/* Send all bytes. Return 0, or a negative errno. */
static int send_all(struct stream *stream, const void *data, size_t size, int flags)
{
	const char *at = data;
	size_t left = size;

	while (left) {
		ssize_t sent = send(stream->fd, at, left, flags | MSG_NOSIGNAL);

		if (sent < 0 && errno != EINTR)
			return -errno;
		if (sent > 0) {
			at += sent;
			left -= (size_t)sent;
		}
	}
	tagging_wrote(&stream->tagging, size);
	return 0;
}

static int receive_all(struct stream *stream, void *data, size_t size)
{
	char *at = data;

	while (size) {
		ssize_t got = recv(stream->fd, at, size, MSG_WAITALL);

		if (!got)
			return -ECONNRESET;
		if (got < 0 && errno != EINTR)
			return -errno;
		if (got > 0) {
			at += got;
			size -= (size_t)got;
		}
	}
	return 0;
}

/* Send a message. MSG_EOR keeps a segment from having bytes of a tagged range and others. MSG_MORE delays the header
 * until the data is there, so that the peer wakes up once. */
static int send_message(struct stream *stream, struct request *request)
{
	const struct send_decision *decision = &request->decision;
	uint64_t header = htobe64(request->size);
	int error, end = decision->tagged ? MSG_EOR : 0;

	error = tagging_pass(&stream->tagging, HEADER + request->size);
	if (!error)
		error = send_all(stream, &header, HEADER, end | (request->size ? MSG_MORE : 0));
	if (!error && decision->tagged)
		error = tagging_announce(&stream->tagging, (uint32_t)request->size, decision);
	return error ? error : send_all(stream, request->data, request->size, end);
}

static int receive_message(struct stream *stream, struct request *request)
{
	uint64_t header;
	int error = receive_all(stream, &header, HEADER);

	if (error)
		return error;
	if (be64toh(header) > request->size)
		return -EMSGSIZE;
	request->size = be64toh(header);
	return receive_all(stream, request->data, request->size);
}

/* Return whether the peer has vanished, or has aborted, while nothing was sent. Once it has ended the connection
 * properly, nothing more is an error. */
static bool vanished(struct stream *stream)
{
	char byte;

	if (recv(stream->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != EINTR)
		stream_fail(stream, errno);
	return atomic_load(&stream->error);
}

/* Return the next request, or NULL when the stream closes, or when the peer of a sending one has vanished. */
static struct request *next_request(struct stream *stream)
{
	struct request *request = NULL;
	bool gone = false;

	pthread_mutex_lock(&stream->lock);
	while (stream->done == stream->posted && !stream->closing && !gone) {
		struct timespec until;

		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += IDLE_SECONDS;
		if (pthread_cond_timedwait(&stream->changed, &stream->lock, &until) && stream->sends)
			gone = vanished(stream);
	}
	if (!stream->closing && !gone)
		request = &stream->requests[stream->done % NCCL_NET_REQUESTS_MAX];
	pthread_mutex_unlock(&stream->lock);
	return request;
}

void stream_fail(struct stream *stream, int error)
{
	char host[INET_ADDRSTRLEN] = "?", why[TROUBLE_MAX];
	int none = 0;

	if (!atomic_compare_exchange_strong(&stream->error, &none, error) || atomic_load(&stream->closing))
		return;
	inet_ntop(AF_INET, &stream->peer.sin_addr, host, sizeof(host));
	snprintf(why, sizeof(why), "the connection of rank %u %s %s broke: %s", job.rank, stream->sends ? "to" : "from",
		 host, strerror(error));
	job_break(stream->epoch, why);
}

static void *run(void *argument)
{
	struct stream *stream = argument;
	struct request *request;

	while ((request = next_request(stream))) {
		int error = stream->sends ? send_message(stream, request) : receive_message(stream, request);

		if (error) {
			stream_fail(stream, -error);
			return NULL;
		}
		atomic_store(&request->state, REQUEST_DONE);
		pthread_mutex_lock(&stream->lock);
		stream->done++;
		pthread_mutex_unlock(&stream->lock);
	}
	return NULL;
}

struct stream *stream_open(int fd, bool sends, const struct tagging *tagging)
{
	struct stream *stream = calloc(1, sizeof(*stream));
	socklen_t size = sizeof(stream->peer);

	if (!stream)
		return NULL;
	stream->fd = fd;
	stream->sends = sends;
	stream->epoch = job_epoch();
	if (tagging)
		stream->tagging = *tagging;
	pthread_mutex_init(&stream->tagging.lock, NULL);
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->changed, NULL);
	getpeername(fd, (struct sockaddr *)&stream->peer, &size);
	for (int i = 0; i < NCCL_NET_REQUESTS_MAX; i++)
		stream->requests[i].stream = stream;
	if (pthread_create(&stream->thread, NULL, run, stream)) {
		free(stream);
		return NULL;
	}
	if (sends)
		list_add(stream);
	return stream;
}

struct request *stream_post(struct stream *stream, void *data, size_t size, const struct send_mark *mark)
{
	struct request *request = &stream->requests[stream->posted % NCCL_NET_REQUESTS_MAX];

	if (atomic_load(&request->state) != REQUEST_FREE)
		return NULL;
	request->data = data;
	request->size = size;
	if (mark)
		request->decision = decide(mark, data, size, &stream->order);
	atomic_store(&request->state, REQUEST_QUEUED);
	pthread_mutex_lock(&stream->lock);
	stream->posted++;
	pthread_cond_signal(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	return request;
}

bool stream_test(struct request *request, size_t *size)
{
	if (atomic_load(&request->state) != REQUEST_DONE)
		return false;
	*size = request->size;
	atomic_store(&request->state, REQUEST_FREE);
	return true;
}

void stream_close(struct stream *stream)
{
	pthread_mutex_lock(&stream->lock);
	stream->closing = true;
	pthread_cond_signal(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	/* Ends a blocked call. What the kernel has is still sent. The peer of a receiving stream is told by `close`: that
	 * all has arrived, or that something was not read. */
	shutdown(stream->fd, stream->sends ? SHUT_RDWR : SHUT_RD);
	pthread_join(stream->thread, NULL);
	list_remove(stream);
	tagging_acknowledge(&stream->tagging);
	close(stream->fd);
	free(stream);
}
