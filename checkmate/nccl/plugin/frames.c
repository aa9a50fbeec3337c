/* SPDX-License-Identifier: Apache-2.0 */
#include "frames.h"

#include <endian.h>
#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>

#define RANGE_MAX (1u << 30) /* bytes of several messages */

/* All fields are big-endian. */
struct header {
	uint64_t count;
	uint64_t sizes[FRAME_MESSAGES]; /* 0 behind the last */
};

static int send_all(int fd, struct tagging *tagging, const void *data, size_t size, int flags)
{
	const char *at = data;
	size_t remaining = size;

	while (remaining) {
		ssize_t sent = send(fd, at, remaining, flags | MSG_NOSIGNAL);

		if (sent < 0 && errno != EINTR)
			return -errno;
		if (sent > 0) {
			at += sent;
			remaining -= (size_t)sent;
		}
	}
	tagging_wrote(tagging, size);
	return 0;
}

static int receive_all(int fd, void *data, size_t size)
{
	char *at = data;

	while (size) {
		ssize_t got = recv(fd, at, size, MSG_WAITALL);

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

/* Return the first message from `at` on that has bytes, or NULL. */
static const struct message *filled(const struct frame *frame, uint32_t at)
{
	while (at < frame->count && !frame->messages[at]->size)
		at++;
	return at < frame->count ? frame->messages[at] : NULL;
}

/* Return whether a tagged message continues another one in their stream. */
static bool continues(const struct message *message, const struct message *earlier)
{
	const struct send_decision *a = &message->decision, *b = &earlier->decision;

	return a->tagged && a->epoch == b->epoch && a->channel == b->channel && a->shadow_id == b->shadow_id &&
	       b->position + earlier->size == a->position;
}

/* Return the bytes of the range that begins with a tagged message. */
static uint64_t range_from(const struct frame *frame, uint32_t at)
{
	const struct message *last = frame->messages[at];
	uint64_t length = last->size;

	while (++at < frame->count && continues(frame->messages[at], last)) {
		last = frame->messages[at];
		if (length + last->size > RANGE_MAX)
			break;
		length += last->size;
	}
	return length;
}

/* Flags of a write that the message `next` of a frame follows, or nothing. MSG_EOR keeps a segment from having bytes of
 * a range and others. MSG_MORE delays a short segment until more is there, so that the peer wakes up once. */
static int flags_before(const struct message *next, bool range_ends)
{
	return (range_ends || (next && next->decision.tagged) ? MSG_EOR : 0) | (next ? MSG_MORE : 0);
}

int frame_send_header(const struct frame *frame, int fd, struct tagging *tagging)
{
	struct header header = {.count = htobe64(frame->count)};
	int error = tagging_pass(tagging, sizeof(header));

	for (uint32_t i = 0; i < frame->count; i++)
		header.sizes[i] = htobe64(frame->messages[i]->size);
	return error ? error : send_all(fd, tagging, &header, sizeof(header), flags_before(filled(frame, 0), false));
}

int frame_send_message(struct frame *frame, int fd, struct tagging *tagging)
{
	const struct message *message = frame->messages[frame->next++], *next = filled(frame, frame->next);
	int error = 0, flags;

	if (!message->decision.tagged) {
		error = tagging_pass(tagging, message->size);
		flags = flags_before(next, false);
	} else {
		if (message->size > RANGE_MAX)
			return -EMSGSIZE; /* NCCL's are at most half of its buffer */
		if (!frame->announced) {
			frame->announced = range_from(frame, frame->next - 1);
			error = tagging_announce(tagging, (uint32_t)frame->announced, &message->decision);
		}
		frame->announced -= message->size;
		flags = frame->announced ? MSG_MORE : flags_before(next, true);
	}
	return error ? error : send_all(fd, tagging, message->data, message->size, flags);
}

static int receive_header(struct frame_reader *reader, int fd)
{
	struct header header;
	int error = receive_all(fd, &header, sizeof(header));

	if (error)
		return error;
	if (!header.count || be64toh(header.count) > FRAME_MESSAGES)
		return -EPROTO;
	reader->count = (uint32_t)be64toh(header.count);
	reader->next = 0;
	for (uint32_t i = 0; i < reader->count; i++)
		reader->sizes[i] = be64toh(header.sizes[i]);
	return 0;
}

int frame_receive_message(struct frame_reader *reader, int fd, struct message *message)
{
	int error = reader->next == reader->count ? receive_header(reader, fd) : 0;

	if (error)
		return error;
	if (reader->sizes[reader->next] > message->size)
		return -EMSGSIZE;
	message->size = reader->sizes[reader->next++];
	return receive_all(fd, message->data, message->size);
}
