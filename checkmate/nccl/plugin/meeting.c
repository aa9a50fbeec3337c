/* SPDX-License-Identifier: Apache-2.0 */
#include "meeting.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "job.h"

enum { SECRET = 16, NEWCOMERS = 8, BACKLOG = 64, GREETING_SECONDS = 5, CONNECT_SECONDS = 60, VANISHED_SECONDS = 15 };

struct connecting {
	int fd;
	time_t since;
	struct tagging tagging;
};

/* What NCCL carries to the other rank; the last field is used there. */
struct handle {
	struct sockaddr_in address;
	unsigned char secret[SECRET];
	struct connecting *connecting;
};

_Static_assert(sizeof(struct handle) <= NCCL_NET_HANDLE_MAX, "NCCL's handles are smaller");

struct newcomer {
	int fd; /* -1: none */
	size_t have;
	time_t since;
	unsigned char secret[SECRET];
};

struct listening {
	int fd;
	unsigned char secret[SECRET];
	struct newcomer newcomers[NEWCOMERS];
};

static time_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec;
}

static int fail(const char *what)
{
	job_log(NCCL_LOG_WARN, "%s: %s", what, strerror(errno));
	return NCCL_SYSTEM_ERROR;
}

/* Use loss-based congestion control, as our own ring does: BBR's pacing costs much processor time over veth. Reno is
 * never missing. */
static void set_up_congestion_control(int fd)
{
	if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", strlen("cubic")))
		setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", strlen("reno"));
}

static void set_up(int fd)
{
	int one = 1, milliseconds = VANISHED_SECONDS * 1000, third = VANISHED_SECONDS / 3, probes = 2;

	set_up_congestion_control(fd);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &third, sizeof(third));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &third, sizeof(third));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

static struct stream *begin_stream(int fd, bool sends, const struct tagging *tagging)
{
	struct stream *stream = NULL;

	if (!fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK))
		stream = stream_open(fd, sends, tagging);
	if (!stream)
		close(fd);
	return stream;
}

int meeting_listen(void *place, struct listening **made)
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
	handle->address.sin_addr.s_addr = job.address;
	listening->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (listening->fd < 0 || bind(listening->fd, (struct sockaddr *)&handle->address, size) ||
	    listen(listening->fd, BACKLOG) ||
	    getsockname(listening->fd, (struct sockaddr *)&handle->address, &size) ||
	    getrandom(listening->secret, SECRET, 0) != SECRET) {
		int result = fail("cannot listen at the NIC of the job file");

		meeting_close(listening);
		return result;
	}
	memcpy(handle->secret, listening->secret, SECRET);
	*made = listening;
	return NCCL_SUCCESS;
}

static int begin_connecting(struct handle *handle, bool ours)
{
	struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = job.address};
	struct connecting *made = calloc(1, sizeof(*made));

	if (!made)
		return NCCL_SYSTEM_ERROR;
	handle->connecting = made;
	made->since = now();
	made->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (made->fd < 0 || bind(made->fd, (struct sockaddr *)&own, sizeof(own)))
		return fail("cannot use the NIC of the job file");
	set_up(made->fd);
	tagging_begin(&made->tagging, made->fd);
	if (ours && job_tags()) {
		int error = tagging_prepare(&made->tagging);

		if (error)
			job_fail("the kernel refuses to prepare a socket for tags: %s", strerror(-error));
	}
	if (connect(made->fd, (struct sockaddr *)&handle->address, sizeof(handle->address)) && errno != EINPROGRESS)
		return fail("cannot connect to the next rank");
	return NCCL_SUCCESS;
}

static int stop_connecting(struct handle *handle, int result)
{
	if (handle->connecting->fd >= 0)
		close(handle->connecting->fd);
	free(handle->connecting);
	handle->connecting = NULL;
	return result;
}

int meeting_connect(void *place, bool ours, struct stream **made)
{
	struct handle *handle = place;
	struct connecting *connecting;
	struct pollfd ready = {.events = POLLOUT};
	socklen_t size = sizeof(int);
	int error = 0, result;

	*made = NULL;
	if (!handle->connecting && (result = begin_connecting(handle, ours)))
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
	if (send(connecting->fd, handle->secret, SECRET, MSG_NOSIGNAL) != SECRET)
		return stop_connecting(handle, fail("cannot greet the next rank"));
	tagging_wrote(&connecting->tagging, SECRET);
	*made = begin_stream(connecting->fd, true, &connecting->tagging);
	connecting->fd = -1;
	return stop_connecting(handle, *made ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR);
}

static void take_newcomer(struct listening *listening, int fd)
{
	struct newcomer *oldest = &listening->newcomers[0];

	for (int i = 0; i < NEWCOMERS && oldest->fd >= 0; i++)
		if (listening->newcomers[i].fd < 0 || listening->newcomers[i].since < oldest->since)
			oldest = &listening->newcomers[i];
	if (oldest->fd >= 0)
		close(oldest->fd);
	*oldest = (struct newcomer){.fd = fd, .since = now()};
}

static bool same_secret(const unsigned char *a, const unsigned char *b)
{
	unsigned char different = 0;

	for (int i = 0; i < SECRET; i++)
		different |= a[i] ^ b[i];
	return !different;
}

/* Return whether a newcomer has shown the secret; close it if it cannot. */
static bool hear(struct listening *listening, struct newcomer *one)
{
	ssize_t got = recv(one->fd, one->secret + one->have, SECRET - one->have, 0);

	if (got > 0)
		one->have += (size_t)got;
	if (one->have == SECRET && same_secret(one->secret, listening->secret))
		return true;
	if (one->have == SECRET || !got || (got < 0 && errno != EAGAIN) || now() - one->since > GREETING_SECONDS) {
		close(one->fd);
		one->fd = -1;
	}
	return false;
}

int meeting_accept(struct listening *listening, struct stream **made)
{
	int fd;

	*made = NULL;
	while ((fd = accept4(listening->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0)
		take_newcomer(listening, fd);
	for (int i = 0; i < NEWCOMERS; i++) {
		struct newcomer *one = &listening->newcomers[i];

		if (one->fd < 0 || !hear(listening, one))
			continue;
		set_up(one->fd);
		*made = begin_stream(one->fd, false, NULL);
		one->fd = -1;
		return *made ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
	}
	return NCCL_SUCCESS;
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
