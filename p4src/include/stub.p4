// SPDX-License-Identifier: Apache-2.0
// Feature `stub`: packets for the stub's address go to the controller, except plain ACKs and a stranger's flood.
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

    @name(".stub_arp") IN_TCAM
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

    @name(".stub") IN_TCAM
    table endpoints { // the control plane has the feature's name (types.p4)
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

// For packets to punt. It is a control of its own, so that the lookup does not wait for the payload's length.
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

// For packets to punt. Each shadow node's NIC has a rate of its own, so that no flood of others can starve it, even
// if they share a link between switches. Strangers share the rate of their port.
control limit_punts(in headers_t hdr, inout metadata_t meta) {
    DIRECT_METER(client_rate, ".client_rate");
    INDEXED_METER(stranger_rate, ".stranger_rate", PORTS);
    INDEXED_COUNTER(limited, ".limited", REASONS);

    @name(".meter_client")
    action meter_client() {
        EXECUTE_DIRECT(client_rate, meta.color)
    }

    @name(".clients") IN_TCAM
    table clients {
        key = {
            meta.ingress_port : exact @name("port");
            meta.source       : exact @name("address");
        }
        actions = { meter_client; @defaultonly NoAction; }
        const default_action = NoAction();
        meters = client_rate;
        size = CLIENTS_TABLE_SIZE;
    }

    apply {
        if (clients.apply().hit) {
            if (meta.color == RED) {
                meta.verdict = DROP;
                limited.count(LIMITED_CLIENT);
            }
        } else {
            EXECUTE_INDEXED(stranger_rate, meta.ingress_port, meta.color)
            if (meta.color == RED) {
                meta.verdict = DROP;
                limited.count(LIMITED_STRANGER);
            }
        }
    }
}

#endif
