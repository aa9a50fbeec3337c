// SPDX-License-Identifier: Apache-2.0
// A register counts each port's packets; the count travels in a trailer-like header that is pushed in front.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

const bit<16> COUNTED = 0x88B5;
const bit<32> PORTS = 512;

header count_t {
    bit<16> ether_type;
    bit<9>  port;
    bit<7>  rest;
    bit<32> packets;
    int<16> distance;
    bit<32> length;
}

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> ether_type;
}

struct headers_t {
    ethernet_t ethernet;
    count_t    count;
}

struct metadata_t { }

parser read(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type, packet.lookahead<bit<8>>()) {
            (COUNTED, 0x08): count;
            (COUNTED, 0x80 &&& 0x80): skip;
            default: accept;
        }
    }
    state count {
        packet.extract(hdr.count);
        transition accept;
    }
    state skip {
        packet.advance(32);
        transition accept;
    }
}

control check(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

control ingress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    register<bit<32>, bit<32>>(PORTS) packets;
    counter<bit<9>>(PORTS, CounterType.packets_and_bytes) totals;

    action push(bit<9> port, int<16> least) {
        bit<32> seen;
        packets.read(seen, (bit<32>) standard.ingress_port);
        seen = seen |+| 1;
        packets.write((bit<32>) standard.ingress_port, seen);
        if (!hdr.count.isValid()) {
            hdr.count.setValid();
            hdr.count.ether_type = hdr.ethernet.ether_type;
            hdr.ethernet.ether_type = COUNTED;
        } else {
            hdr.count.rest = hdr.count.rest + 1;
        }
        hdr.count.port = standard.ingress_port;
        hdr.count.packets = seen;
        hdr.count.distance = (int<16>) (bit<16>) seen |-| hdr.count.distance;
        if (hdr.count.distance < least) {
            hdr.count.distance = least;
        }
        standard.egress_spec = port;
    }

    action pop(bit<9> port) {
        hdr.ethernet.ether_type = hdr.count.ether_type;
        hdr.count.setInvalid();
        standard.egress_spec = port;
    }

    action flood(bit<16> group) {
        standard.mcast_grp = group;
    }

    table ports {
        key = { standard.ingress_port: exact; hdr.count.isValid(): exact; hdr.ethernet.destination: ternary; }
        actions = { push; pop; flood; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (7, false, 0x010000000000 &&& 0x010000000000): flood(3);
            (7, false, _): push(8, 16s100);
            (8, true, _): pop(7);
        }
    }

    apply {
        totals.count(standard.ingress_port);
        if (!ports.apply().hit) {
            mark_to_drop(standard);
        }
    }
}

control egress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    apply {
        if (standard.egress_rid != 0) {
            hdr.ethernet.source[15:0] = standard.egress_rid;
        }
        if (standard.instance_type == 5 && standard.egress_port == standard.ingress_port) {
            mark_to_drop(standard);
        }
        if (hdr.count.isValid()) {
            hdr.count.length = standard.packet_length;
        }
    }
}

control renew(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

control write(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.count);
    }
}

V1Switch(read(), check(), ingress(), egress(), renew(), write()) main;
