// SPDX-License-Identifier: Apache-2.0
// The ingress side: the features in their order. A later one overrules an earlier one.

#ifndef CHECKMATE_INGRESS
#define CHECKMATE_INGRESS

control ingress_features(in headers_t hdr, inout metadata_t meta) {
    apply {
        guard.apply(hdr, meta);
        if (meta.verdict != DROP) {
            if (hdr.tcp.isValid()) {
                meta.payload_length = hdr.ipv4.total_length |-| meta.headers_length;
            }
            forwarding.apply(hdr, meta);
            stub.apply(hdr, meta);
            if (meta.verdict == PUNT) {
                end_plain_acks.apply(hdr, meta);
                if (meta.verdict == PUNT) {
                    limit_punts.apply(hdr, meta);
                }
            } else {
                replication.apply(hdr, meta);
            }
        }
    }
}

#endif
