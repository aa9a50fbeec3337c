/* SPDX-License-Identifier: Apache-2.0
 *
 * How two ranks find each other: a listening socket, its handle, which NCCL brings to the other rank, and connections
 * of which both sides have proved that they have the key. That is the job's, combined with random bytes of the handle.
 * Nothing here blocks.
 */
#ifndef CHECKMATE_NCCL_MEETING_H
#define CHECKMATE_NCCL_MEETING_H

#include "stream.h"

struct listening;

/* Listen at the job's NIC, and describe that in `handle` (NCCL_NET_HANDLE_MAX bytes). Return an ncclResult_t. */
int meeting_listen(void *handle, struct listening **result);
/* Connect, or go on connecting. `*stream` stays NULL until that is done. Tags can be set if `may_tag`. */
int meeting_connect(void *handle, bool may_tag, struct stream **stream);
/* Accept, as `meeting_connect`. Connections from elsewhere, and those without a proof, are closed. */
int meeting_accept(struct listening *listening, struct stream **stream);
int meeting_close(struct listening *listening);

#endif
