/* SPDX-License-Identifier: Apache-2.0
 *
 * What Python has told the plugin of its job, and what the plugin tells Python. All functions may be called from any
 * thread. A process has one job.
 */
#ifndef CHECKMATE_NCCL_JOB_H
#define CHECKMATE_NCCL_JOB_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>

#include "nccl_api.h"
#include "slicing.h"

#define EXPORTED __attribute__((visibility("default")))

enum { CHANNELS_MAX = 8, SHADOW_IDS_MAX = 16, BUCKETS_MAX = 4096, RANKS_MAX = 65536, TROUBLE_MAX = 512 };

/* The structures below are mirrored in checkmate/nccl/library.py. */
struct nccl_job {
	uint32_t address; /* of the NIC for gradients, in network order */
	uint32_t ranks;
	uint32_t rank;
	uint32_t channels; /* of the communicator */
	struct slicing_sizes sizes;
	uint32_t incarnation;
	uint32_t dscp_bit;
	int32_t sockets_map; /* the tagger's map of sockets; -1 to tag nothing */
	int32_t speed; /* Mbit/s */
	char interface[16];
	unsigned char key[16]; /* made of the job's ring.key */
};

struct nccl_bucket {
	uint64_t address;
	uint64_t elements;
	uint32_t itemsize;
	uint32_t shadow_id;
	uint32_t allowed; /* channels that NCCL may use; 0 for all of the job's */
	uint32_t used; /* channels that carry it; 0 until NCCL has shown it */
};

/* Return the job that began last, which never changes: the next one is another struct. Threads of earlier connections
 * may still have an earlier one. */
const struct nccl_job *job_now(void);

/* Begin with a job, in place of an earlier one. Connections of the earlier one are not tagged any more.
 * Return 0, or -1 if it has numbers that no job has, such as too many channels. */
EXPORTED int checkmate_nccl_begin(const struct nccl_job *values);
/* Set the buckets. Return 0, or -1 for too many of them or of shadow ids. */
EXPORTED int checkmate_nccl_buckets(const struct nccl_bucket *list, uint32_t count);
/* Set the addresses of all ranks, in network order: nobody else may connect. Return 0, or -1 for too many. */
EXPORTED int checkmate_nccl_peers(const uint32_t *addresses, uint32_t count);
EXPORTED uint32_t checkmate_nccl_used(uint32_t number);
/* Announce that this process creates the communicator of gradients until it is called with 0. */
EXPORTED void checkmate_nccl_expect(int expected);
/* Stop tagging for good, for a reason. */
EXPORTED void checkmate_nccl_stop(const char *why);
/* Copy the first reason for which tagging stopped; return its length, 0 if there is none. */
EXPORTED uint32_t checkmate_nccl_trouble(char *text, uint32_t size);
/* Copy the first error of a connection of this job, which some versions of NCCL ignore; return its length, 0 if there
 * is none. */
EXPORTED uint32_t checkmate_nccl_broken(char *text, uint32_t size);
/* The bytes of a stream that were tagged, and those that the peer has acknowledged (stream.c). */
EXPORTED void checkmate_nccl_count(uint32_t channel, uint32_t shadow_id, uint64_t *tagged, uint64_t *acknowledged);

/* Compute a MAC of 16 bytes with a key of 16 bytes: what `proof` uses, for tests. */
EXPORTED void checkmate_nccl_mac(const unsigned char *key, const unsigned char *message, size_t size,
				 unsigned char *mac);

bool job_present(void);
/* Return whether an address, in network order, is that of a rank. */
bool job_has_peer(uint32_t address);
/* Return the number of the job in this process. */
uint32_t job_epoch(void);
bool job_tags(void);
void job_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Note that a connection of a job broke, for Python and the log. Tagging stops. */
void job_break(uint32_t job_number, const char *why);
/* Log a line to NCCL's logger, with the place of the caller. */
#define job_log(LEVEL, ...) job_log_from(__FILE__, __LINE__, LEVEL, __VA_ARGS__)
void job_log_from(const char *file, int line, int level, const char *format, ...) __attribute__((format(printf, 4, 5)));
void job_use_logger(nccl_logger logger);

/* Learn a communicator's number while it is created; tell whether a number is that of the gradients. */
void job_meet(uint64_t comm_hash);
bool job_is_ours(uint64_t comm_hash);
bool job_expects(void);

/* Find the bucket of a collective by its address and size, and copy it. Return its number, or -1. */
int job_find_bucket(const void *buffer, uint64_t elements, struct nccl_bucket *copy);
bool job_copy_bucket(uint32_t number, struct nccl_bucket *copy);
/* Note how many channels carry a bucket, unless the buckets have been replaced since it was found. */
void job_set_used(int number, const struct nccl_bucket *copy, uint32_t used);
/* Count tagged bytes of a job, and set the stream's position before them. Return false for an earlier job, whose bytes
 * do not count. */
bool job_add_tagged(uint32_t job_number, uint32_t channel, uint32_t shadow_id, uint64_t nbytes, uint64_t *position);
uint64_t job_tagged(uint32_t channel, uint32_t shadow_id);
uint64_t job_acknowledged(uint32_t channel, uint32_t shadow_id);
void job_set_acknowledged(uint32_t job_number, uint32_t channel, uint32_t shadow_id, uint64_t position);

#endif
