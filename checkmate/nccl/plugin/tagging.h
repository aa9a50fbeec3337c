/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranges of one socket's bytes that the kernel tags (checkmate/tagger/tagger.h). A range is in the kernel before its
 * first byte is written, and stays until its last byte is acknowledged. Without the tagger, ranges are only counted.
 * Used by one thread at a time, but for `tagging_acknowledge`.
 */
#ifndef CHECKMATE_NCCL_TAGGING_H
#define CHECKMATE_NCCL_TAGGING_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "../../tagger/tagger.h"
#include "decision.h"

struct tagging {
	int fd;
	bool prepared; /* the kernel knows the socket */
	pthread_mutex_t lock; /* of the fields below */
	uint64_t written;
	uint64_t kernel_end; /* of the newest range that the kernel knows, in bytes written; 0 for none */
	struct tagged_socket socket;
	struct {
		uint64_t end; /* in bytes written */
		uint64_t position; /* of its end in the stream */
		uint32_t epoch;
		uint32_t shadow_id;
		uint32_t channel;
	} live[TAGGER_RANGES];
};

void tagging_begin(struct tagging *tagging, int fd);
/* Begin with what another one has, which ends; with nothing if it is NULL. */
void tagging_move(struct tagging *tagging, struct tagging *from, int fd);
void tagging_end(struct tagging *tagging);
/* Prepare the socket for tags, before it connects. Return 0, or a negative errno. */
int tagging_prepare(struct tagging *tagging);
/* Count bytes that were written. */
void tagging_wrote(struct tagging *tagging, uint64_t nbytes);
/* Announce the next `length` bytes as tagged. If the kernel refuses that, tagging stops, and the bytes go untagged.
 * Return 0, or a negative errno if the connection is broken. */
int tagging_announce(struct tagging *tagging, uint32_t length, const struct send_decision *decision);
/* Make room before `length` untagged bytes, because an old range would match again when sequence numbers wrap.
 * Return as `tagging_announce`. */
int tagging_pass(struct tagging *tagging, uint64_t length);
/* Note what the peer has acknowledged. */
void tagging_acknowledge(struct tagging *tagging);

#endif
