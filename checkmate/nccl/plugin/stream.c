/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "job.h"

enum { IDLE_SECONDS = 1 };

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *senders;

/* Note what the peers of all sending streams have acknowledged. */
static void acknowledge_all(void)
{
	pthread_mutex_lock(&list_lock);
	for (struct stream *stream = senders; stream; stream = stream->next)
		tagging_acknowledge(&stream->tagging);
	pthread_mutex_unlock(&list_lock);
}

void checkmate_nccl_count(uint32_t channel, uint32_t shadow_id, uint64_t *sent, uint64_t *received)
{
	*sent = *received = 0;
	if (channel >= CHANNELS_MAX || shadow_id >= SHADOW_IDS_MAX)
		return;
	acknowledge_all();
	*received = job_acknowledged(channel, shadow_id); /* first, because it follows the other */
	*sent = job_tagged(channel, shadow_id);
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

/* Return whether the peer has vanished, or has aborted, while nothing was sent. Once it has ended the connection
 * properly, nothing more is an error. */
static bool vanished(struct stream *stream)
{
	char byte;

	if (recv(stream->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != EINTR)
		stream_fail(stream, errno);
	return atomic_load(&stream->error);
}

/* Wait for requests. Return their number; 0 if the stream closes, or if the peer of a sending one has vanished. */
static uint32_t await_requests(struct stream *stream)
{
	uint32_t posted = 0;
	bool gone = false;

	pthread_mutex_lock(&stream->lock);
	while (stream->done == stream->posted && !stream->closing && !gone) {
		struct timespec until;

		clock_gettime(CLOCK_MONOTONIC, &until); /* a step of the other clock would stall, or spin */
		until.tv_sec += IDLE_SECONDS;
		if (pthread_cond_timedwait(&stream->changed, &stream->lock, &until) && stream->sends)
			gone = vanished(stream);
	}
	if (!stream->closing && !gone)
		posted = (uint32_t)(stream->posted - stream->done);
	pthread_mutex_unlock(&stream->lock);
	return posted;
}

void stream_fail(struct stream *stream, int error)
{
	char host[INET_ADDRSTRLEN] = "?", why[TROUBLE_MAX];
	int none = 0;

	if (!atomic_compare_exchange_strong(&stream->error, &none, error) || atomic_load(&stream->closing))
		return;
	inet_ntop(AF_INET, &stream->peer.sin_addr, host, sizeof(host));
	errno = error;
	snprintf(why, sizeof(why), "the connection of rank %u %s %s broke: %m", job_now()->rank,
		 stream->sends ? "to" : "from", host);
	job_break(stream->epoch, why);
}

static struct request *request_at(struct stream *stream, uint64_t number)
{
	return &stream->requests[number % NCCL_NET_REQUESTS_MAX];
}

/* Note that the oldest request is done. NCCL may use its memory again at once. */
static void finish(struct stream *stream)
{
	atomic_store(&request_at(stream, stream->done)->state, REQUEST_DONE);
	pthread_mutex_lock(&stream->lock);
	stream->done++;
	pthread_mutex_unlock(&stream->lock);
}

static int send_posted(struct stream *stream, uint32_t posted)
{
	struct frame frame = {.count = posted < FRAME_MESSAGES ? posted : FRAME_MESSAGES};
	int error;

	for (uint32_t i = 0; i < frame.count; i++)
		frame.messages[i] = &request_at(stream, stream->done + i)->message;
	error = frame_send_header(&frame, stream->fd, &stream->tagging);
	while (!error && frame.next < frame.count) {
		error = frame_send_message(&frame, stream->fd, &stream->tagging);
		if (!error)
			finish(stream);
	}
	return error;
}

static int receive_posted(struct stream *stream)
{
	struct message *message = &request_at(stream, stream->done)->message;
	int error = frame_receive_message(&stream->reader, stream->fd, message);

	if (!error)
		finish(stream);
	return error;
}

static void *run(void *argument)
{
	struct stream *stream = argument;
	uint32_t posted;

	while ((posted = await_requests(stream))) {
		int error = stream->sends ? send_posted(stream, posted) : receive_posted(stream);

		if (error) {
			stream_fail(stream, -error);
			return NULL;
		}
	}
	return NULL;
}

static void stream_free(struct stream *stream)
{
	tagging_end(&stream->tagging);
	pthread_cond_destroy(&stream->changed);
	pthread_mutex_destroy(&stream->lock);
	free(stream);
}

struct stream *stream_open(int fd, bool sends, struct tagging *tagging)
{
	struct stream *stream = calloc(1, sizeof(*stream));
	socklen_t size = sizeof(stream->peer);
	pthread_condattr_t monotonic;

	if (!stream)
		return NULL;
	stream->fd = fd;
	stream->sends = sends;
	stream->epoch = job_epoch();
	tagging_move(&stream->tagging, tagging, fd);
	pthread_mutex_init(&stream->lock, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&stream->changed, &monotonic);
	pthread_condattr_destroy(&monotonic);
	getpeername(fd, (struct sockaddr *)&stream->peer, &size);
	for (int i = 0; i < NCCL_NET_REQUESTS_MAX; i++)
		stream->requests[i].stream = stream;
	if (pthread_create(&stream->thread, NULL, run, stream)) {
		stream_free(stream);
		return NULL;
	}
	if (sends)
		list_add(stream);
	return stream;
}

struct request *stream_post(struct stream *stream, void *data, size_t size, const struct send_mark *mark)
{
	struct request *request = request_at(stream, stream->posted);

	if (atomic_load(&request->state) != REQUEST_FREE)
		return NULL;
	request->message.data = data;
	request->message.size = size;
	if (mark)
		request->message.decision = events_decide(mark, data, size, &stream->order);
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
	*size = request->message.size;
	atomic_store(&request->state, REQUEST_FREE);
	return true;
}

void stream_close(struct stream *stream)
{
	pthread_mutex_lock(&stream->lock);
	stream->closing = true;
	pthread_cond_signal(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	/* Ends a blocked call. What the kernel has is still sent. The peer of a receiving stream is told by `close`:
	 * that all has arrived, or that something was not read. */
	shutdown(stream->fd, stream->sends ? SHUT_RDWR : SHUT_RD);
	pthread_join(stream->thread, NULL);
	list_remove(stream);
	tagging_acknowledge(&stream->tagging);
	close(stream->fd);
	stream_free(stream);
}
