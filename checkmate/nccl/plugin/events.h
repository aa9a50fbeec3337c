/* SPDX-License-Identifier: Apache-2.0
 *
 * What NCCL's profiler events say of a send: its collective, channel and step. Also the decision whether it is tagged.
 *
 * Records are in rings, because a collective's event stops before its proxy operations start. A ring is longer than
 * what NCCL has in flight. If it were not, a send would be taken for that of a later collective: its serial, order and
 * size are compared, and tagging stops with the reason.
 */
#ifndef CHECKMATE_NCCL_EVENTS_H
#define CHECKMATE_NCCL_EVENTS_H

#include "decision.h"
#include "nccl_api.h"

/* Names this library in events of net plugins: its kind, which NCCL does not interpret, and version 1. */
#define PLUGIN_ID ((int64_t)0x434D << 16 | 1)

enum { EVENTS_MASK = PROFILE_COLL | PROFILE_PROXY_OP | PROFILE_PROXY_STEP | PROFILE_NET_PLUGIN };

void *events_start_group(void);
/* Begin a collective of the gradients. `group` is NULL if it is not known. */
void *events_start_coll(const struct profiler_coll *coll, void *group, bool channels_are_used);
void *events_start_op(void *parent, const struct profiler_proxy_op *op);
void *events_start_step(void *parent, int step);
void events_start_net(void *parent, const struct profiler_net *net);
/* Note that the next send of this thread is a step's, or an operation's. */
void events_announce_step(void *handle);
void events_announce_op(void *handle, int step);
/* Return what this thread has announced, once. */
struct send_mark events_take_announced(void);

/* Decide on a send that is accepted now. During calibration, compare it. */
struct send_decision events_decide(const struct send_mark *mark, const void *data, size_t nbytes,
				   struct send_order *order);

#endif
