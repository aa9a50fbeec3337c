/* SPDX-License-Identifier: Apache-2.0 */
#include "job.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNKNOWN, OURS, DOUBTFUL };

/* Jobs stay, because threads that have them end when NCCL closes their connections. A process has few. */
struct begun_job {
	struct nccl_job job;
	const struct begun_job *earlier;
};

static const struct begun_job no_job = {.job = {.sockets_map = -1}};
static _Atomic(const struct begun_job *) newest = &no_job;

/* Of what follows. A thread that holds it takes no other lock; `list_lock` of stream.c comes before the lock of a
 * stream's tagging, and that before this one. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool present, stopped;
static _Atomic uint32_t epoch;
static char trouble[TROUBLE_MAX], broken[TROUBLE_MAX];
static struct nccl_bucket buckets[BUCKETS_MAX];
static uint32_t bucket_count, next_bucket; /* collectives come in the order of buckets: the search begins there */
static uint32_t peers[RANKS_MAX], peer_count;
static _Atomic uint64_t tagged[CHANNELS_MAX][SHADOW_IDS_MAX], acknowledged[CHANNELS_MAX][SHADOW_IDS_MAX];
static int expecting, standing;
static uint64_t hash;
static _Atomic(nccl_logger) log_to;

int checkmate_nccl_begin(const struct nccl_job *values)
{
	const struct slicing_sizes *sizes = &values->sizes;
	struct begun_job *begun;

	if (!values->channels || values->channels > CHANNELS_MAX || !values->ranks || values->rank >= values->ranks ||
	    !sizes->cell || !sizes->grain || !sizes->alignment || !sizes->steps || !sizes->slice_steps ||
	    sizes->chunk_steps < sizes->slice_steps ||
	    strnlen(values->interface, sizeof(values->interface)) == sizeof(values->interface))
		return -1;
	begun = malloc(sizeof(*begun));
	if (!begun)
		return -1;
	pthread_mutex_lock(&lock);
	*begun = (struct begun_job){.job = *values, .earlier = atomic_load(&newest)};
	atomic_store(&newest, begun);
	bucket_count = next_bucket = peer_count = 0;
	standing = UNKNOWN;
	trouble[0] = broken[0] = 0;
	for (uint32_t i = 0; i < CHANNELS_MAX * SHADOW_IDS_MAX; i++) {
		atomic_store(&tagged[i / SHADOW_IDS_MAX][i % SHADOW_IDS_MAX], 0);
		atomic_store(&acknowledged[i / SHADOW_IDS_MAX][i % SHADOW_IDS_MAX], 0);
	}
	atomic_fetch_add(&epoch, 1);
	atomic_store(&stopped, false);
	atomic_store(&present, true);
	pthread_mutex_unlock(&lock);
	return 0;
}

int checkmate_nccl_buckets(const struct nccl_bucket *list, uint32_t count)
{
	if (count > BUCKETS_MAX)
		return -1;
	for (uint32_t i = 0; i < count; i++)
		if (list[i].shadow_id >= SHADOW_IDS_MAX)
			return -1;
	pthread_mutex_lock(&lock);
	memcpy(buckets, list, count * sizeof(*list));
	bucket_count = count;
	next_bucket = 0;
	pthread_mutex_unlock(&lock);
	return 0;
}

int checkmate_nccl_peers(const uint32_t *addresses, uint32_t count)
{
	if (count > RANKS_MAX)
		return -1;
	pthread_mutex_lock(&lock);
	memcpy(peers, addresses, count * sizeof(*addresses));
	peer_count = count;
	pthread_mutex_unlock(&lock);
	return 0;
}

uint32_t checkmate_nccl_used(uint32_t number)
{
	struct nccl_bucket copy;

	return job_copy_bucket(number, &copy) ? copy.used : 0;
}

void checkmate_nccl_expect(int expected)
{
	pthread_mutex_lock(&lock);
	expecting = expected;
	pthread_mutex_unlock(&lock);
}

void checkmate_nccl_stop(const char *why)
{
	job_fail("%s", why);
}

static uint32_t copy_text(char *text, uint32_t size, const char *from)
{
	uint32_t length;

	pthread_mutex_lock(&lock);
	length = (uint32_t)snprintf(text, size, "%s", from);
	pthread_mutex_unlock(&lock);
	return length;
}

uint32_t checkmate_nccl_trouble(char *text, uint32_t size)
{
	return copy_text(text, size, trouble);
}

uint32_t checkmate_nccl_broken(char *text, uint32_t size)
{
	return copy_text(text, size, broken);
}

uint64_t job_acknowledged(uint32_t channel, uint32_t shadow_id)
{
	return atomic_load(&acknowledged[channel][shadow_id]);
}

uint64_t job_tagged(uint32_t channel, uint32_t shadow_id)
{
	return atomic_load(&tagged[channel][shadow_id]);
}

const struct nccl_job *job_now(void)
{
	return &atomic_load(&newest)->job;
}

bool job_present(void)
{
	return atomic_load(&present);
}

bool job_has_peer(uint32_t address)
{
	bool is_peer;

	pthread_mutex_lock(&lock);
	is_peer = address == job_now()->address;
	for (uint32_t i = 0; i < peer_count && !is_peer; i++)
		is_peer = peers[i] == address;
	pthread_mutex_unlock(&lock);
	return is_peer;
}

bool job_tags(void)
{
	return job_present() && !atomic_load(&stopped);
}

uint32_t job_epoch(void)
{
	return atomic_load(&epoch);
}

void job_break(uint32_t job_number, const char *why)
{
	bool current;

	job_log(NCCL_LOG_WARN, "%s", why);
	pthread_mutex_lock(&lock);
	current = job_number == atomic_load(&epoch);
	if (current && !broken[0])
		snprintf(broken, sizeof(broken), "%s", why);
	pthread_mutex_unlock(&lock);
	if (current)
		job_fail("%s", why);
}

void job_fail(const char *format, ...)
{
	char text[TROUBLE_MAX];
	va_list arguments;
	bool first;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	pthread_mutex_lock(&lock);
	first = !atomic_exchange(&stopped, true);
	if (first)
		memcpy(trouble, text, sizeof(text));
	pthread_mutex_unlock(&lock);
	if (first)
		job_log(NCCL_LOG_WARN, "tagging stops: %s", text);
}

void job_log_from(const char *file, int line, int level, const char *format, ...)
{
	nccl_logger logger = atomic_load(&log_to);
	char text[TROUBLE_MAX];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (logger)
		logger(level, NCCL_SUBSYS_NET, file, line, "Checkmate: rank %u: %s", job_now()->rank, text);
}

void job_use_logger(nccl_logger logger)
{
	atomic_store(&log_to, logger);
}

void job_meet(uint64_t comm_hash)
{
	bool two = false;

	pthread_mutex_lock(&lock);
	if (expecting && standing == UNKNOWN) {
		hash = comm_hash;
		standing = OURS;
	} else if (expecting && standing == OURS && hash != comm_hash) {
		standing = DOUBTFUL;
		two = true;
	}
	pthread_mutex_unlock(&lock);
	if (two)
		job_fail("two communicators were created at once, so that of the gradients is not known");
}

bool job_is_ours(uint64_t comm_hash)
{
	bool is_ours;

	pthread_mutex_lock(&lock);
	is_ours = standing == OURS && hash == comm_hash;
	pthread_mutex_unlock(&lock);
	return is_ours;
}

bool job_expects(void)
{
	bool expected;

	pthread_mutex_lock(&lock);
	expected = expecting;
	pthread_mutex_unlock(&lock);
	return expected;
}

int job_find_bucket(const void *buffer, uint64_t elements, struct nccl_bucket *copy)
{
	int number = -1;

	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < bucket_count && number < 0; i++) {
		uint32_t candidate = (next_bucket + i) % bucket_count;

		if (buckets[candidate].address == (uintptr_t)buffer && buckets[candidate].elements == elements)
			number = (int)candidate;
	}
	if (number >= 0) {
		*copy = buckets[number];
		next_bucket = (uint32_t)number + 1;
	}
	pthread_mutex_unlock(&lock);
	return number;
}

bool job_copy_bucket(uint32_t number, struct nccl_bucket *copy)
{
	bool exists;

	pthread_mutex_lock(&lock);
	exists = number < bucket_count;
	if (exists)
		*copy = buckets[number];
	pthread_mutex_unlock(&lock);
	return exists;
}

void job_set_used(int number, const struct nccl_bucket *copy, uint32_t used)
{
	pthread_mutex_lock(&lock);
	if ((uint32_t)number < bucket_count && buckets[number].address == copy->address)
		buckets[number].used = used;
	pthread_mutex_unlock(&lock);
}

bool job_add_tagged(uint32_t job_number, uint32_t channel, uint32_t shadow_id, uint64_t nbytes, uint64_t *position)
{
	bool current;

	pthread_mutex_lock(&lock);
	current = job_number == atomic_load(&epoch);
	if (current)
		*position = atomic_fetch_add(&tagged[channel][shadow_id], nbytes);
	pthread_mutex_unlock(&lock);
	return current;
}

void job_set_acknowledged(uint32_t job_number, uint32_t channel, uint32_t shadow_id, uint64_t position)
{
	pthread_mutex_lock(&lock);
	if (job_number == atomic_load(&epoch))
		atomic_store(&acknowledged[channel][shadow_id], position);
	pthread_mutex_unlock(&lock);
}
