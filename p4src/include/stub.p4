// SPDX-License-Identifier: Apache-2.0
// Feature `stub`: what reaches the stub's address goes to the controller, except plain ACKs.
// Control plane: controlplane/stub.py. Packet tests: ptf_tests/stub.py.

#ifndef CHECKMATE_STUB
#define CHECKMATE_STUB

control stub(in headers_t hdr, inout metadata_t meta) {
    DIRECT_COUNTER(punted_arp, ".punted_arp");
    DIRECT_COUNTER(stub_segments, ".stub_segments");

    @name(".punt_arp")
    action punt_arp() {
        punted_arp.count();
        meta.verdict = PUNT;
    }

    @name(".stub_arp")
    table addresses {
        key = { hdr.arp.target_ip : exact @name("address"); }
        actions = { punt_arp; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = punted_arp;
        size = STUB_TABLE_SIZE;
    }

    @name(".punt_segment")
    action punt_segment() {
        stub_segments.count();
        meta.verdict = PUNT;
    }

    @name(".stub")
    table endpoints {
        key = { hdr.ipv4.destination : exact @name("address"); }
        actions = { punt_segment; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = stub_segments;
        size = STUB_TABLE_SIZE;
    }

    apply {
        if (hdr.arp.isValid()) {
            if (hdr.arp.operation == ARP_REQUEST) {
                addresses.apply();
            }
        } else if (hdr.tcp.isValid()) {
            endpoints.apply();
        }
    }
}

// For what is to be punted. Apart, so that the lookup doesn't wait for the payload's length.
control end_plain_acks(in headers_t hdr, inout metadata_t meta) {
    INDEXED_COUNTER(plain_acks, ".plain_acks", 1);

    apply {
        if (hdr.tcp.isValid()) {
            if (hdr.tcp.flags & (TCP_SYN | TCP_FIN | TCP_RST) == 0 && meta.payload_length == 0) {
                meta.verdict = DROP;
                plain_acks.count(0);
            }
        }
    }
}

#endif
