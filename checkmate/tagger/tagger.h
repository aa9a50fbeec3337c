/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared between the tagger and user space: the option on the wire, and a socket's tagged ranges.
 * tests/wire/test_tag.py compares the option with checkmate/wire/tag.py. program.py mirrors the ranges.
 */
#ifndef CHECKMATE_TAGGER_H
#define CHECKMATE_TAGGER_H

#include <linux/types.h>

#define TAG_KIND 253
#define TAG_LENGTH 16
#define TAG_EXID 0xC4EC

/* Big-endian throughout (design, section 2). */
struct tag_option {
	__u8 kind;
	__u8 length;
	__be16 exid;
	__be32 sequence;
	__be32 anchor;
	__be16 shadow_id;
	__u8 channel;
	__u8 incarnation;
} __attribute__((packed));

/* A power of two. Twice a socket's state must stay well below net.core.optmem_max. */
#define TAGGER_RANGES 256

/* One chunk: TCP sequence numbers [anchor, anchor + length), at position `sequence` of its stream. */
struct tag_range {
	__u32 anchor;
	__u32 length;
	__u32 sequence;
	__u16 shadow_id;
	__u8 channel;
	__u8 incarnation;
};

/* User space writes the whole structure, and the kernel replaces it atomically, so the program never sees
 * a partial change. Ranges [head, tail) are live; range i is at ranges[i % TAGGER_RANGES].
 * The program writes the first two fields, once, when the connection is established. */
struct tagged_socket {
	__u32 established;
	__u32 first_sequence; /* sequence number of the first byte that the connection sends */
	__u32 plain_tos;
	__u32 tagged_tos;
	__u32 head;
	__u32 tail;
	struct tag_range ranges[TAGGER_RANGES];
};

enum fault {
	FAULT_RESERVE, /* no room left for the option */
	FAULT_STORE, /* the option could not be written */
	FAULT_TOS, /* the DSCP bit could not be set or cleared */
	FAULT_FLAGS, /* the callbacks could not be switched on */
	FAULTS,
};

#endif
