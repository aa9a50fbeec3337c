/* SPDX-License-Identifier: Apache-2.0 */
#include "meeting.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "job.h"
#include "proof.h"

enum { NEWCOMERS = 64, BACKLOG = 64, PROOF_SECONDS = 60, CONNECT_SECONDS = 60, VANISHED_SECONDS = 15 };
enum progress { BROKEN, GOING_ON, DONE };

struct connecting {
	int fd;
	time_t since;
	struct tagging tagging;
	struct proof proof;
	bool greeted; /* with our nonce */
	size_t have; /* of the answer */
	struct proof_answer answer;
};

/* What NCCL carries to the other rank; the last field is used there. */
struct handle {
	struct sockaddr_in address;
	unsigned char random[KEY_BYTES];
	struct connecting *connecting;
};

_Static_assert(sizeof(struct handle) <= NCCL_NET_HANDLE_MAX, "NCCL's handles are smaller");

struct newcomer {
	int fd; /* -1: none */
	uint32_t address;
	uint64_t turn; /* in the order of arrival */
	time_t since;
	struct proof proof;
	size_t nonce_have, mac_have;
	unsigned char mac[MAC_BYTES];
};

struct listening {
	int fd;
	unsigned char key[KEY_BYTES];
	uint64_t turns;
	struct newcomer newcomers[NEWCOMERS];
};

static time_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec;
}

static int fail(const char *fault)
{
	job_log(NCCL_LOG_WARN, "%s: %m", fault);
	return NCCL_SYSTEM_ERROR;
}

/* Use loss-based congestion control, as our own ring does: BBR's pacing costs much processor time over veth. Reno is
 * never missing. */
static void set_up_congestion_control(int fd)
{
	if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", strlen("cubic")))
		setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", strlen("reno"));
}

/* Keep a socket to the NIC of the job file. If a host has several in one subnet, its routes name another one, from
 * which the switch drops the address. */
static void keep_to_nic(int fd)
{
	const struct nccl_job *job = job_now();

	if (fd >= 0 && job->interface[0] &&
	    setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, job->interface, (socklen_t)strlen(job->interface)))
		job_log(NCCL_LOG_WARN, "cannot keep a connection to %s: %m", job->interface);
}

static void set_up(int fd)
{
	int on = 1, milliseconds = VANISHED_SECONDS * 1000, third = VANISHED_SECONDS / 3, probes = 2;

	set_up_congestion_control(fd);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &third, sizeof(third));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &third, sizeof(third));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

static struct stream *begin_stream(int fd, bool sends, struct tagging *tagging)
{
	struct stream *stream = NULL;

	if (!fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK))
		stream = stream_open(fd, sends, tagging);
	if (!stream)
		close(fd);
	return stream;
}

/* Combine the job's key with a handle's random bytes, so that a proof is of one meeting only. */
static void make_key(unsigned char key[KEY_BYTES], const unsigned char random[KEY_BYTES])
{
	const struct nccl_job *job = job_now();

	for (int i = 0; i < KEY_BYTES; i++)
		key[i] = job->key[i] ^ random[i];
}

static bool send_whole(int fd, const void *bytes, size_t size)
{
	return send(fd, bytes, size, MSG_NOSIGNAL) == (ssize_t)size; /* little enough for an empty buffer */
}

/* Receive what is missing of `size` bytes at `place`, of which `*have` are there. */
static enum progress receive_rest(int fd, void *place, size_t size, size_t *have)
{
	ssize_t got = recv(fd, (unsigned char *)place + *have, size - *have, 0);

	if (!got)
		errno = ECONNRESET;
	if (got <= 0)
		return got < 0 && errno == EAGAIN ? GOING_ON : BROKEN;
	*have += (size_t)got;
	return *have == size ? DONE : GOING_ON;
}

int meeting_listen(void *place, struct listening **result)
{
	struct handle *handle = place;
	struct listening *listening = calloc(1, sizeof(*listening));
	socklen_t size = sizeof(handle->address);

	if (!listening)
		return NCCL_SYSTEM_ERROR;
	for (int i = 0; i < NEWCOMERS; i++)
		listening->newcomers[i].fd = -1;
	memset(handle, 0, sizeof(*handle));
	handle->address.sin_family = AF_INET;
	handle->address.sin_addr.s_addr = job_now()->address;
	listening->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	keep_to_nic(listening->fd);
	if (listening->fd < 0 || bind(listening->fd, (struct sockaddr *)&handle->address, size) ||
	    listen(listening->fd, BACKLOG) || getsockname(listening->fd, (struct sockaddr *)&handle->address, &size) ||
	    !proof_random(handle->random, KEY_BYTES)) {
		int error = fail("cannot listen at the NIC of the job file");

		meeting_close(listening);
		return error;
	}
	make_key(listening->key, handle->random);
	*result = listening;
	return NCCL_SUCCESS;
}

static int begin_connecting(struct handle *handle, bool may_tag)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = job_now()->address};
	struct connecting *connecting = calloc(1, sizeof(*connecting));

	if (!connecting)
		return NCCL_SYSTEM_ERROR;
	handle->connecting = connecting;
	connecting->since = now();
	make_key(connecting->proof.key, handle->random);
	connecting->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	keep_to_nic(connecting->fd);
	if (connecting->fd < 0 || bind(connecting->fd, (struct sockaddr *)&address, sizeof(address)))
		return fail("cannot use the NIC of the job file");
	set_up(connecting->fd);
	tagging_begin(&connecting->tagging, connecting->fd);
	if (may_tag && job_tags()) {
		int error = tagging_prepare(&connecting->tagging);

		if (error) {
			errno = -error;
			job_fail("the kernel refuses to prepare a socket for tags: %m");
		}
	}
	if (connect(connecting->fd, (struct sockaddr *)&handle->address, sizeof(handle->address)) &&
	    errno != EINPROGRESS)
		return fail("cannot connect to the next rank");
	return NCCL_SUCCESS;
}

static int stop_connecting(struct handle *handle, int result)
{
	if (handle->connecting->fd >= 0) {
		tagging_end(&handle->connecting->tagging);
		close(handle->connecting->fd);
	}
	free(handle->connecting);
	handle->connecting = NULL;
	return result;
}

/* Exchange proofs with the side that accepts. Nothing of it is tagged. */
static enum progress greet(struct connecting *connecting)
{
	struct proof *proof = &connecting->proof;
	struct proof_answer *answer = &connecting->answer;
	unsigned char mac[MAC_BYTES];
	enum progress answered;

	if (!connecting->greeted) {
		if (!proof_random(proof->nonces[CONNECTS], NONCE_BYTES) ||
		    !send_whole(connecting->fd, proof->nonces[CONNECTS], NONCE_BYTES))
			return BROKEN;
		tagging_wrote(&connecting->tagging, NONCE_BYTES);
		connecting->greeted = true;
	}
	answered = receive_rest(connecting->fd, answer, sizeof(*answer), &connecting->have);
	if (answered != DONE)
		return answered;
	memcpy(proof->nonces[ACCEPTS], answer->nonce, NONCE_BYTES);
	if (!proof_holds(proof, ACCEPTS, answer->mac)) {
		errno = EACCES;
		return BROKEN;
	}
	proof_mac(proof, CONNECTS, mac);
	if (!send_whole(connecting->fd, mac, MAC_BYTES))
		return BROKEN;
	tagging_wrote(&connecting->tagging, MAC_BYTES);
	return DONE;
}

int meeting_connect(void *place, bool may_tag, struct stream **stream)
{
	struct handle *handle = place;
	struct connecting *connecting;
	struct pollfd ready = {.events = POLLOUT};
	socklen_t size = sizeof(int);
	int error = 0, result;

	*stream = NULL;
	if (!handle->connecting && (result = begin_connecting(handle, may_tag)))
		return handle->connecting ? stop_connecting(handle, result) : result;
	connecting = handle->connecting;
	ready.fd = connecting->fd;
	if (poll(&ready, 1, 0) != 1) {
		if (now() - connecting->since < CONNECT_SECONDS)
			return NCCL_SUCCESS;
		errno = ETIMEDOUT;
		return stop_connecting(handle, fail("cannot connect to the next rank"));
	}
	if (getsockopt(connecting->fd, SOL_SOCKET, SO_ERROR, &error, &size) || error) {
		errno = error ? error : errno;
		return stop_connecting(handle, fail("cannot connect to the next rank"));
	}
	switch (greet(connecting)) {
	case GOING_ON:
		return NCCL_SUCCESS; /* the next rank may accept late: NCCL decides how long it waits for it */
	case BROKEN:
		return stop_connecting(handle, fail("the next rank does not prove that it has this job's key"));
	case DONE:
		break;
	}
	*stream = begin_stream(connecting->fd, true, &connecting->tagging);
	connecting->fd = -1;
	return stop_connecting(handle, *stream ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR);
}

static void leave(struct newcomer *newcomer)
{
	close(newcomer->fd);
	newcomer->fd = -1;
}

/* Return a free place, or that of the oldest newcomer of the address that has most. */
static struct newcomer *find_place(struct listening *listening)
{
	struct newcomer *oldest = NULL;
	int most = 0;

	for (int i = 0; i < NEWCOMERS; i++) {
		struct newcomer *newcomer = &listening->newcomers[i];
		int count = 0;

		if (newcomer->fd < 0)
			return newcomer;
		for (int j = 0; j < NEWCOMERS; j++)
			count += listening->newcomers[j].address == newcomer->address;
		if (count > most || (count == most && newcomer->turn < oldest->turn)) {
			oldest = newcomer;
			most = count;
		}
	}
	return oldest;
}

static void take_newcomer(struct listening *listening, int fd, uint32_t address)
{
	struct newcomer *place = find_place(listening);

	if (place->fd >= 0)
		leave(place);
	*place = (struct newcomer){.fd = fd, .address = address, .turn = listening->turns++, .since = now()};
	memcpy(place->proof.key, listening->key, KEY_BYTES);
}

/* Answer a newcomer's nonce, and check its MAC. */
static enum progress hear(struct newcomer *newcomer)
{
	struct proof *proof = &newcomer->proof;
	struct proof_answer answer;
	enum progress heard;

	if (newcomer->nonce_have < NONCE_BYTES) {
		heard = receive_rest(newcomer->fd, proof->nonces[CONNECTS], NONCE_BYTES, &newcomer->nonce_have);
		if (heard != DONE)
			return heard;
		if (!proof_random(proof->nonces[ACCEPTS], NONCE_BYTES))
			return BROKEN;
		memcpy(answer.nonce, proof->nonces[ACCEPTS], NONCE_BYTES);
		proof_mac(proof, ACCEPTS, answer.mac);
		if (!send_whole(newcomer->fd, &answer, sizeof(answer)))
			return BROKEN;
	}
	heard = receive_rest(newcomer->fd, newcomer->mac, MAC_BYTES, &newcomer->mac_have);
	return heard == DONE && !proof_holds(proof, CONNECTS, newcomer->mac) ? BROKEN : heard;
}

/* Hear all newcomers. Return one that has proved itself, or NULL; close those that can't or do not in time. */
static struct newcomer *hear_all(struct listening *listening)
{
	for (int i = 0; i < NEWCOMERS; i++) {
		struct newcomer *newcomer = &listening->newcomers[i];
		enum progress heard = newcomer->fd < 0 ? GOING_ON : hear(newcomer);

		if (heard == DONE)
			return newcomer;
		if (heard == BROKEN || (newcomer->fd >= 0 && now() - newcomer->since > PROOF_SECONDS))
			leave(newcomer);
	}
	return NULL;
}

int meeting_accept(struct listening *listening, struct stream **stream)
{
	struct newcomer *proved = hear_all(listening); /* before others take their places */
	struct sockaddr_in from;
	socklen_t size = sizeof(from);
	int fd;

	*stream = NULL;
	for (int i = 0; i < NEWCOMERS && !proved; i++) {
		fd = accept4(listening->fd, (struct sockaddr *)&from, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
		if (fd < 0)
			break;
		if (job_has_peer(from.sin_addr.s_addr))
			take_newcomer(listening, fd, from.sin_addr.s_addr);
		else
			close(fd);
	}
	if (!proved && !(proved = hear_all(listening)))
		return NCCL_SUCCESS;
	set_up(proved->fd);
	*stream = begin_stream(proved->fd, false, NULL);
	proved->fd = -1;
	return *stream ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
}

int meeting_close(struct listening *listening)
{
	for (int i = 0; i < NEWCOMERS; i++)
		if (listening->newcomers[i].fd >= 0)
			close(listening->newcomers[i].fd);
	if (listening->fd >= 0)
		close(listening->fd);
	free(listening);
	return NCCL_SUCCESS;
}
