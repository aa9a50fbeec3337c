/* SPDX-License-Identifier: Apache-2.0 */
#include "tagging.h"

#include <errno.h>
#include <linux/bpf.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "job.h"

#define RETIRE_AFTER (1u << 30) /* untagged bytes */

static const struct timespec POLL = {.tv_nsec = 100000};

static int call(int command, const struct tagging *tagging, void *value)
{
	union bpf_attr attributes;

	memset(&attributes, 0, sizeof(attributes));
	attributes.map_fd = (uint32_t)job_now()->sockets_map;
	attributes.key = (uintptr_t)&tagging->fd;
	attributes.value = (uintptr_t)value;
	return syscall(SYS_bpf, command, &attributes, sizeof(attributes)) ? -errno : 0;
}

void tagging_begin(struct tagging *tagging, int fd)
{
	memset(tagging, 0, sizeof(*tagging));
	pthread_mutex_init(&tagging->lock, NULL);
	tagging->fd = fd;
}

void tagging_end(struct tagging *tagging)
{
	pthread_mutex_destroy(&tagging->lock);
}

void tagging_move(struct tagging *tagging, struct tagging *from, int fd)
{
	if (!from) {
		tagging_begin(tagging, fd);
		return;
	}
	tagging_end(from); /* a mutex that is in use may not be copied */
	*tagging = *from;
	pthread_mutex_init(&tagging->lock, NULL);
}

int tagging_prepare(struct tagging *tagging)
{
	const struct nccl_job *job = job_now();
	int tos = 0, error;
	socklen_t size = sizeof(tos);

	if (job->sockets_map < 0)
		return 0;
	if (getsockopt(tagging->fd, IPPROTO_IP, IP_TOS, &tos, &size))
		return -errno;
	tagging->socket.plain_tos = (uint32_t)tos & ~(job->dscp_bit << 2);
	tagging->socket.tagged_tos = tagging->socket.plain_tos | job->dscp_bit << 2;
	error = call(BPF_MAP_UPDATE_ELEM, tagging, &tagging->socket);
	tagging->prepared = !error;
	return error;
}

void tagging_wrote(struct tagging *tagging, uint64_t nbytes)
{
	pthread_mutex_lock(&tagging->lock);
	tagging->written += nbytes;
	pthread_mutex_unlock(&tagging->lock);
}

/* Drop the ranges whose last byte is acknowledged. The next update tells the kernel. */
static int reap(struct tagging *tagging)
{
	struct tagged_socket *socket = &tagging->socket;
	uint64_t acknowledged;
	int waiting;

	if (ioctl(tagging->fd, SIOCOUTQ, &waiting))
		return -errno;
	/* The kernel may have bytes of a write that is not counted yet. */
	acknowledged = tagging->written > (uint64_t)waiting ? tagging->written - (uint64_t)waiting : 0;
	for (; socket->head != socket->tail; socket->head++) {
		uint32_t at = socket->head % TAGGER_RANGES;

		if (tagging->live[at].end > acknowledged)
			break;
		job_set_acknowledged(tagging->live[at].epoch, tagging->live[at].channel, tagging->live[at].shadow_id,
				     tagging->live[at].position);
	}
	return 0;
}

void tagging_acknowledge(struct tagging *tagging)
{
	pthread_mutex_lock(&tagging->lock);
	reap(tagging);
	pthread_mutex_unlock(&tagging->lock);
}

/* Wait, with the lock, until at most `most` ranges are unacknowledged. */
static int await_ranges(struct tagging *tagging, uint32_t most)
{
	for (;;) {
		int error = reap(tagging), broken = 0;
		socklen_t size = sizeof(broken);

		if (error || tagging->socket.tail - tagging->socket.head <= most)
			return error;
		if (getsockopt(tagging->fd, SOL_SOCKET, SO_ERROR, &broken, &size) || broken)
			return broken ? -broken : -errno;
		pthread_mutex_unlock(&tagging->lock);
		nanosleep(&POLL, NULL);
		pthread_mutex_lock(&tagging->lock);
	}
}

/* Learn the connection's first sequence number from the kernel, once. */
static int learn_first_sequence(struct tagging *tagging)
{
	struct tagged_socket state;
	int error;

	if (!tagging->prepared || tagging->socket.established)
		return 0;
	error = call(BPF_MAP_LOOKUP_ELEM, tagging, &state);
	if (error || !state.established)
		return error ? error : -ENOTCONN; /* not created in the tagger's cgroup */
	tagging->socket.established = 1;
	tagging->socket.first_sequence = state.first_sequence;
	return 0;
}

/* If the kernel refuses a call, tagging stops. */
static bool granted(int error)
{
	if (error) {
		errno = -error;
		job_fail("the kernel refuses a tag: %m");
	}
	return !error;
}

static int add(struct tagging *tagging, uint32_t length, const struct send_decision *decision)
{
	struct tagged_socket *socket = &tagging->socket;
	int error = await_ranges(tagging, TAGGER_RANGES - 1);
	uint32_t at;

	if (error || decision->epoch != job_epoch() || !granted(learn_first_sequence(tagging)))
		return error;
	at = socket->tail++ % TAGGER_RANGES;
	socket->ranges[at] = (struct tag_range){
		.anchor = socket->first_sequence + (uint32_t)tagging->written,
		.length = length,
		.sequence = (uint32_t)decision->position,
		.shadow_id = (uint16_t)decision->shadow_id,
		.channel = (uint8_t)decision->channel,
		.incarnation = (uint8_t)job_now()->incarnation,
	};
	tagging->live[at].end = tagging->written + length;
	tagging->live[at].position = decision->position + length;
	tagging->live[at].epoch = decision->epoch;
	tagging->live[at].shadow_id = decision->shadow_id;
	tagging->live[at].channel = decision->channel;
	if (tagging->prepared) {
		tagging->kernel_end = tagging->live[at].end;
		granted(call(BPF_MAP_UPDATE_ELEM, tagging, socket));
	}
	return 0;
}

int tagging_announce(struct tagging *tagging, uint32_t length, const struct send_decision *decision)
{
	int error;

	pthread_mutex_lock(&tagging->lock);
	error = add(tagging, length, decision);
	pthread_mutex_unlock(&tagging->lock);
	return error;
}

int tagging_pass(struct tagging *tagging, uint64_t length)
{
	int error = 0;

	pthread_mutex_lock(&tagging->lock);
	if (tagging->kernel_end && tagging->written + length - tagging->kernel_end > RETIRE_AFTER) {
		error = await_ranges(tagging, 0);
		if (!error)
			granted(call(BPF_MAP_UPDATE_ELEM, tagging, &tagging->socket));
		tagging->kernel_end = 0;
	}
	pthread_mutex_unlock(&tagging->lock);
	return error;
}
