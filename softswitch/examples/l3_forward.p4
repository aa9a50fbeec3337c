// SPDX-License-Identifier: Apache-2.0
// Layer 3 forwarding: longest prefix to next hop, TTL, IPv4 checksum; other frames by MAC; an access list on top.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> ether_type;
}

header ipv4_t {
    bit<4>  version;
    bit<4>  header_words;
    bit<8>  tos;
    bit<16> total_length;
    bit<16> identification;
    bit<16> fragment;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> source;
    bit<32> destination;
}

header ports_t {
    bit<16> source;
    bit<16> destination;
}

struct headers_t {
    ethernet_t ethernet;
    ipv4_t     ipv4;
    ports_t    ports;
}

struct metadata_t { }

error { NotIpv4 }

parser read(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            0x0800: ipv4;
            default: accept;
        }
    }
    state ipv4 {
        packet.extract(hdr.ipv4);
        verify(hdr.ipv4.version == 4, error.NotIpv4);
        transition select(hdr.ipv4.header_words, hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (5, 0 &&& 0x1FFF, 6): ports;
            (5, 0 &&& 0x1FFF, 17): ports;
            default: accept;
        }
    }
    state ports {
        packet.extract(hdr.ports);
        transition accept;
    }
}

control check(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum(hdr.ipv4.isValid() && hdr.ipv4.header_words == 5,
            { hdr.ipv4.version, hdr.ipv4.header_words, hdr.ipv4.tos, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.source, hdr.ipv4.destination },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control ingress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    direct_counter(CounterType.packets_and_bytes) routed;

    action drop() {
        mark_to_drop(standard);
    }

    action route(bit<9> port, bit<48> next_hop) {
        routed.count();
        standard.egress_spec = port;
        hdr.ethernet.source = hdr.ethernet.destination;
        hdr.ethernet.destination = next_hop;
        hdr.ipv4.ttl = hdr.ipv4.ttl |-| 1;
    }

    table routes {
        key = { hdr.ipv4.destination: lpm; }
        actions = { route; drop; }
        default_action = drop();
        counters = routed;
        size = 1024;
    }

    action forward(bit<9> port) {
        standard.egress_spec = port;
    }

    table stations {
        key = { hdr.ethernet.destination: exact; }
        actions = { forward; @defaultonly drop; }
        const default_action = drop();
        size = 1024;
    }

    table access {
        key = {
            hdr.ipv4.source: ternary;
            hdr.ipv4.protocol: optional;
            hdr.ports.destination: range;
        }
        actions = { drop; NoAction; }
        default_action = NoAction();
        size = 64;
    }

    apply {
        if (standard.parser_error != error.NoError || standard.checksum_error == 1) {
            drop();
        } else if (hdr.ipv4.isValid()) {
            routes.apply();
            if (hdr.ipv4.ttl == 0) {
                drop();
            }
            access.apply();
        } else {
            stations.apply();
        }
    }
}

control egress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    apply { }
}

control renew(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid() && hdr.ipv4.header_words == 5,
            { hdr.ipv4.version, hdr.ipv4.header_words, hdr.ipv4.tos, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.source, hdr.ipv4.destination },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control write(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.ports);
    }
}

V1Switch(read(), check(), ingress(), egress(), renew(), write()) main;
