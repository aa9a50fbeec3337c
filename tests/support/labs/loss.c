/* SPDX-License-Identifier: Apache-2.0
 *
 * Drops LOSS_PER_MILLE of 1,000 packets at random: what `tc netem loss` does, for kernels without netem.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

SEC("classifier")
int lose(struct __sk_buff *packet)
{
	return bpf_get_prandom_u32() % 1000 < LOSS_PER_MILLE ? TC_ACT_SHOT : TC_ACT_OK;
}

char LICENSE[] SEC("license") = "Apache-2.0";
