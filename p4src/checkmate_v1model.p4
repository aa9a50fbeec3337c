// SPDX-License-Identifier: Apache-2.0
// Checkmate for v1model (BMv2 and the embedded target): only what the architecture forces.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

#define DIRECT_COUNTER(instance, path) \
    @name(path) direct_counter(CounterType.packets_and_bytes) instance
#define INDEXED_COUNTER(instance, path, size) \
    @name(path) counter<bit<8>>(size, CounterType.packets_and_bytes) instance

#include "include/sizes.p4"
#include "include/headers.p4"
#include "include/stub.p4"
#include "include/replication.p4"
#include "include/forwarding.p4"
#include "include/streams.p4"

// The port under which the switch speaks with its controller: simple_switch_grpc's --cpu-port.
const port_t CPU_PORT = 510;

// A copy's headers as they came, so that checksums can be mended as RFC 1624 says:
// HC' = ~(~HC + ~m + m'). A segment that came damaged leaves damaged, and the shadow node's kernel
// drops it as the trainer's does.
struct before_t {
    ipv4_t       ipv4;
    tcp_t        tcp;
    timestamps_t timestamps;
    tag_t        tag;
    bit<16>      ipv4_sum; // ~(HC + m), which is ~HC + ~m
    bit<16>      tcp_sum;
}

struct local_t {
    metadata_t meta;
    before_t   before;
}

parser checkmate_parser(packet_in packet, out headers_t hdr, inout local_t local,
                        inout standard_metadata_t standard) {
    state start {
        local.meta.ingress_port = standard.ingress_port;
        transition select(standard.ingress_port) {
            CPU_PORT: from_cpu;
            default: ethernet;
        }
    }

    state from_cpu {
        packet.extract(hdr.packet_out);
        transition accept;
    }

    state ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4: ipv4;
            ETHERTYPE_ARP: arp;
            default: accept;
        }
    }

    state arp {
        packet.extract(hdr.arp);
        transition accept;
    }

    state ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version, hdr.ipv4.header_words, hdr.ipv4.more_fragments,
                          hdr.ipv4.fragment_offset, hdr.ipv4.protocol) {
            (4, 5, 0, 0, PROTOCOL_TCP): tcp;
            default: accept;
        }
    }

    state tcp {
        packet.extract(hdr.tcp);
        transition select(hdr.tcp.data_offset) {
            OFFSET_TAG: first_option;
            OFFSET_TIMESTAMPS_TAG: timestamps_option;
            default: accept;
        }
    }

    state timestamps_option {
        transition select(packet.lookahead<bit<32>>()) {
            TIMESTAMPS_PREFIX: timestamps;
            default: accept;
        }
    }

    state timestamps {
        packet.extract(hdr.timestamps);
        transition first_option;
    }

    state first_option {
        transition select(packet.lookahead<bit<32>>()) {
            TAG_PREFIX: tag;
            default: accept;
        }
    }

    state tag {
        packet.extract(hdr.tag);
        transition accept;
    }
}

control checkmate_ingress(inout headers_t hdr, inout local_t local, inout standard_metadata_t standard) {
    apply {
        if (hdr.packet_out.isValid()) {
            local.meta.egress_port = hdr.packet_out.egress_port;
            hdr.packet_out.setInvalid();
        } else {
            if (hdr.tcp.isValid()) {
                local.meta.payload_length = hdr.ipv4.total_length |-| 20;
                local.meta.payload_length =
                    local.meta.payload_length |-| (bit<16>) (hdr.tcp.data_offset ++ 2w0);
            }
            stub.apply(hdr, local.meta);
            if (local.meta.punt == 0 && local.meta.drop == 0) {
                replication.apply(hdr, local.meta);
                if (local.meta.replicated == 0) {
                    forwarding.apply(hdr, local.meta);
                }
            }
        }

        if (local.meta.drop == 1) {
            mark_to_drop(standard);
        } else if (local.meta.punt == 1) {
            standard.egress_spec = CPU_PORT;
        } else if (local.meta.group != 0) {
            standard.mcast_grp = local.meta.group;
        } else {
            standard.egress_spec = local.meta.egress_port;
        }
    }
}

control checkmate_egress(inout headers_t hdr, inout local_t local, inout standard_metadata_t standard) {
    action remember() {
        local.before.ipv4       = hdr.ipv4;
        local.before.tcp        = hdr.tcp;
        local.before.timestamps = hdr.timestamps;
        local.before.tag        = hdr.tag;
    }

    apply {
        if (local.meta.punt == 1) {
            hdr.packet_in.setValid();
            hdr.packet_in.padding      = 0;
            hdr.packet_in.ingress_port = local.meta.ingress_port;
        } else {
            local.meta.egress_port    = standard.egress_port;
            local.meta.replication_id = standard.egress_rid;
            if (local.meta.replicated == 1 && standard.egress_rid != TRAINING_COPY) {
                remember();
            }
            streams.apply(hdr, local.meta);
            never_back.apply(local.meta);
            if (local.meta.drop == 1) {
                mark_to_drop(standard);
            }
        }
    }
}

control no_verification(inout headers_t hdr, inout local_t local) {
    apply { }
}

control mend_checksums(inout headers_t hdr, inout local_t local) {
    apply {
        update_checksum(local.meta.rewritten == 1,
            { local.before.ipv4.checksum, local.before.ipv4.total_length,
              local.before.ipv4.source, local.before.ipv4.destination },
            local.before.ipv4_sum, HashAlgorithm.csum16);
        update_checksum(local.meta.rewritten == 1,
            { local.before.ipv4_sum, hdr.ipv4.total_length, hdr.ipv4.source, hdr.ipv4.destination },
            hdr.ipv4.checksum, HashAlgorithm.csum16);

        // The segment's length counts through the pseudo header; total_length differs from it by a constant.
        update_checksum(local.meta.rewritten == 1,
            { local.before.tcp.checksum, local.before.ipv4.total_length,
              local.before.ipv4.source, local.before.ipv4.destination,
              local.before.tcp.source_port, local.before.tcp.destination_port, local.before.tcp.sequence, local.before.tcp.acknowledgement,
              local.before.tcp.data_offset, local.before.tcp.reserved, local.before.tcp.cwr, local.before.tcp.ece, local.before.tcp.urg,
              local.before.tcp.ack, local.before.tcp.psh, local.before.tcp.rst, local.before.tcp.syn, local.before.tcp.fin, local.before.tcp.window,
              local.before.tcp.urgent_pointer,
              local.before.timestamps.prefix, local.before.timestamps.value,
              local.before.timestamps.echo_reply,
              local.before.tag.kind, local.before.tag.length, local.before.tag.exid,
              local.before.tag.sequence, local.before.tag.anchor,
              local.before.tag.shadow_id, local.before.tag.channel, local.before.tag.incarnation },
            local.before.tcp_sum, HashAlgorithm.csum16);
        update_checksum(local.meta.rewritten == 1,
            { local.before.tcp_sum, hdr.ipv4.total_length, hdr.ipv4.source, hdr.ipv4.destination,
              hdr.tcp.source_port, hdr.tcp.destination_port, hdr.tcp.sequence, hdr.tcp.acknowledgement,
              hdr.tcp.data_offset, hdr.tcp.reserved, hdr.tcp.cwr, hdr.tcp.ece, hdr.tcp.urg,
              hdr.tcp.ack, hdr.tcp.psh, hdr.tcp.rst, hdr.tcp.syn, hdr.tcp.fin, hdr.tcp.window,
              hdr.tcp.urgent_pointer },
            hdr.tcp.checksum, HashAlgorithm.csum16);
    }
}

control checkmate_deparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.arp);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.tcp);
        packet.emit(hdr.timestamps);
        packet.emit(hdr.tag);
    }
}

V1Switch(checkmate_parser(), no_verification(), checkmate_ingress(), checkmate_egress(),
         mend_checksums(), checkmate_deparser()) main;
