// SPDX-License-Identifier: Apache-2.0
// Equal-cost multipath: a hash over the five-tuple chooses one of a prefix's next hops.

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
    bit<3>  flags;
    bit<13> fragment_offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> source;
    bit<32> destination;
}

header udp_t {
    bit<16> source;
    bit<16> destination;
    bit<16> length;
    bit<16> checksum;
}

struct headers_t {
    ethernet_t ethernet;
    ipv4_t     ipv4;
    udp_t      udp;
}

struct metadata_t {
    bit<16> source_port;      // 0 unless UDP
    bit<16> destination_port;
    bit<16> group;
    bit<16> member;
    bit<1>  balanced;
}

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
        transition select(hdr.ipv4.protocol) {
            17: udp;
            default: accept;
        }
    }
    state udp {
        packet.extract(hdr.udp);
        meta.source_port = hdr.udp.source;
        meta.destination_port = hdr.udp.destination;
        transition accept;
    }
}

control check(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

control ingress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    action drop() {
        mark_to_drop(standard);
    }

    // `members` may be 0 or not a power of two.
    action balance(bit<16> group, bit<32> members) {
        meta.group = group;
        meta.balanced = 1;
        hash(meta.member, HashAlgorithm.crc16, 16w0,
             { hdr.ipv4.source, hdr.ipv4.destination, hdr.ipv4.protocol,
               meta.source_port, meta.destination_port },
             members);
    }

    action direct(bit<9> port) {
        standard.egress_spec = port;
    }

    table groups {
        key = { hdr.ipv4.destination: lpm; }
        actions = { balance; direct; drop; }
        const default_action = drop();
        size = 256;
    }

    action next_hop(bit<9> port, bit<48> station) {
        standard.egress_spec = port;
        hdr.ethernet.destination = station;
    }

    table members {
        key = { meta.group: exact; meta.member: exact; }
        actions = { next_hop; @defaultonly drop; }
        const default_action = drop();
        size = 1024;
    }

    apply {
        if (!hdr.ipv4.isValid()) {
            drop();
            exit;
        }
        switch (groups.apply().action_run) {
            balance: {
                members.apply();
            }
            direct: {
                hdr.ipv4.tos = 0;
            }
        }
    }
}

control egress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    apply {
        // Which way was taken shows in the packet: flags and the low bits of the identification.
        if (meta.balanced == 1) {
            hdr.ipv4.flags = hdr.ipv4.flags ^ 0b100;
            hdr.ipv4.identification = hdr.ipv4.identification[15:4] ++ meta.member[3:0];
        }
    }
}

control renew(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum_with_payload(hdr.udp.isValid(),
            { hdr.ipv4.source, hdr.ipv4.destination, 8w0, hdr.ipv4.protocol, hdr.udp.length,
              hdr.udp.source, hdr.udp.destination, hdr.udp.length },
            hdr.udp.checksum, HashAlgorithm.csum16);
    }
}

control write(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

V1Switch(read(), check(), ingress(), egress(), renew(), write()) main;
