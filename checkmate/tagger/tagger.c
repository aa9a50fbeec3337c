/* SPDX-License-Identifier: Apache-2.0
 *
 * Tags the segments of sockets for which user space has set ranges (design, sections 2 and 5).
 * This is a sockops program: the TCP stack calls it while it builds each TCP header, before the IP header.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "tagger.h"

#define IP_TOS 1 /* <netinet/ip.h> is not for BPF */

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tagged_socket);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FAULTS);
	__type(key, __u32);
	__type(value, __u64);
} faults SEC(".maps");

static __always_inline void count(__u32 which, long error)
{
	__u64 *counter;

	if (!error)
		return;
	counter = bpf_map_lookup_elem(&faults, &which);
	if (counter)
		__sync_fetch_and_add(counter, 1);
}

static __always_inline void mark(struct bpf_sock_ops *ops, int tos)
{
	count(FAULT_TOS, bpf_setsockopt(ops, IPPROTO_IP, IP_TOS, &tos, sizeof(tos)));
}

/* Enable callbacks for this socket's segments. Sockets without ranges never get them, at no cost. */
static __always_inline void begin(struct bpf_sock_ops *ops, struct tagged_socket *socket)
{
	socket->first_sequence = ops->snd_nxt;
	socket->established = 1;
	count(FAULT_FLAGS,
	      bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG));
}

/* Reserve room in every data segment, tagged or not, because the MSS holds for the whole connection. */
static __always_inline void reserve(struct bpf_sock_ops *ops, struct tagged_socket *socket)
{
	if (ops->args[0] == BPF_WRITE_HDR_TCP_CURRENT_MSS || ops->skb_len)
		count(FAULT_RESERVE, bpf_reserve_hdr_opt(ops, TAG_LENGTH, 0));
	else
		mark(ops, socket->plain_tos); /* a bare ACK, FIN or probe: write() is not called */
}

/* Search the newest ranges first: those of chunks that are still to come are few, and older ones are needed only for
 * retransmissions. */
static __always_inline struct tag_range *range_of(struct tagged_socket *socket, __u32 sequence)
{
	__u32 live = socket->tail - socket->head;

#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < TAGGER_RANGES; i++) {
		struct tag_range *range;

		if (i >= live)
			break;
		range = &socket->ranges[(socket->tail - 1 - i) & (TAGGER_RANGES - 1)];
		if (sequence - range->anchor < range->length)
			return range;
	}
	return NULL;
}

static __always_inline void write(struct bpf_sock_ops *ops, struct tagged_socket *socket)
{
	struct tcphdr *tcp = ops->skb_data;
	struct tag_option option = {.kind = TAG_KIND, .length = TAG_LENGTH, .exid = bpf_htons(TAG_EXID)};
	struct tag_range *range;

	if ((void *)(tcp + 1) > ops->skb_data_end)
		return;
	range = range_of(socket, bpf_ntohl(tcp->seq));
	if (!range) {
		mark(ops, socket->plain_tos); /* the kernel fills the reserved room with NOPs */
		return;
	}
	option.sequence = bpf_htonl(range->sequence);
	option.anchor = bpf_htonl(range->anchor);
	option.shadow_id = bpf_htons(range->shadow_id);
	option.channel = range->channel;
	option.incarnation = range->incarnation;
	count(FAULT_STORE, bpf_store_hdr_opt(ops, &option, sizeof(option), 0));
	mark(ops, socket->tagged_tos);
}

SEC("sockops")
int checkmate_tagger(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct tagged_socket *socket;

	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		break;
	default: /* leave other programs' replies unchanged */
		return 1;
	}
	if (!sk)
		return 1;
	socket = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	if (!socket)
		return 1;
	if (ops->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		begin(ops, socket);
	else if (ops->op == BPF_SOCK_OPS_HDR_OPT_LEN_CB)
		reserve(ops, socket);
	else
		write(ops, socket);
	return 1;
}

char LICENSE[] SEC("license") = "Apache-2.0";
