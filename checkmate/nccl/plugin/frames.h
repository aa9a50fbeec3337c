/* SPDX-License-Identifier: Apache-2.0
 *
 * How NCCL's messages are on a connection: in frames of up to FRAME_MESSAGES. A frame is a header with the number of
 * messages and their lengths, which is never tagged, and then their bytes. A sender makes a frame of what is posted,
 * so that tagged messages follow each other in one range.
 */
#ifndef CHECKMATE_NCCL_FRAMES_H
#define CHECKMATE_NCCL_FRAMES_H

#include <stddef.h>
#include <stdint.h>

#include "decision.h"
#include "tagging.h"

enum { FRAME_MESSAGES = 7 };

struct message {
	void *data;
	size_t size; /* of one that is received, the room until it is there */
	struct send_decision decision;
};

/* A frame that is sent. A message is not read any more once it was sent. */
struct frame {
	const struct message *messages[FRAME_MESSAGES];
	uint32_t count;
	uint32_t next;
	uint64_t announced; /* bytes of the newest range that are not written */
};

/* What a receiver knows of the messages that come. */
struct frame_reader {
	uint64_t sizes[FRAME_MESSAGES];
	uint32_t count;
	uint32_t next;
};

/* These block. They return 0, or a negative errno. */

int frame_send_header(const struct frame *frame, int fd, struct tagging *tagging);
/* Send the frame's next message. */
int frame_send_message(struct frame *frame, int fd, struct tagging *tagging);
int frame_receive_message(struct frame_reader *reader, int fd, struct message *message);

#endif
