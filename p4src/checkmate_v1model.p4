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

// What a copy's headers added up to as they came, each inverted, so that checksums can be mended as
// RFC 1624 says: HC' = ~(~HC + ~m + m'), where ~(HC + m) is ~HC + ~m. A segment that came damaged leaves
// damaged, and the shadow node's kernel drops it as the trainer's does.
// A header rather than metadata: BMv2 copies and clears metadata with every packet.
header sums_t {
    bit<16> ipv4;
    bit<16> tcp;
    bit<16> timestamps;
    bit<16> tag;
}

struct local_t {
    metadata_t meta;
    sums_t     before;
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
        transition select(hdr.ipv4.version_words, hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (IPV4_WITHOUT_OPTIONS, 0 &&& FRAGMENT_MASK, PROTOCOL_TCP): tcp;
            default: accept;
        }
    }

    state tcp {
        packet.extract(hdr.tcp);
        transition select(hdr.tcp.data_offset) {
            OFFSET_TAG: first_option;
            OFFSET_TIMESTAMPS_TAG: timestamps;
            default: accept;
        }
    }

    state timestamps {
        packet.extract(hdr.timestamps);
        transition select(hdr.timestamps.prefix) {
            TIMESTAMPS_PREFIX: first_option;
            default: accept;
        }
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
                local.meta.payload_length =
                    hdr.ipv4.total_length |-| (20 + (bit<16>) (hdr.tcp.data_offset ++ 2w0));
            }
            stub.apply(hdr, local.meta);
            if (local.meta.verdict == PUNT) {
                end_plain_acks.apply(hdr, local.meta);
            } else {
                replication.apply(hdr, local.meta);
                if (local.meta.verdict == FORWARD) {
                    forwarding.apply(hdr, local.meta);
                    if (local.meta.group == 0) {
                        never_back.apply(local.meta);
                    }
                }
            }
        }

        if (local.meta.verdict == DROP) {
            mark_to_drop(standard);
        } else if (local.meta.verdict == PUNT) {
            standard.egress_spec = CPU_PORT;
        } else if (local.meta.group != 0) {
            standard.mcast_grp = local.meta.group;
        } else {
            standard.egress_spec = local.meta.egress_port;
        }
    }
}

control checkmate_egress(inout headers_t hdr, inout local_t local, inout standard_metadata_t standard) {
    // Over whole headers, since p4c copies each field of a list into metadata of its own first.
    // Absent timestamps add up to 0; inverted that is 0xFFFF, which adds nothing either.
    action remember() {
        local.before.setValid();
        hash(local.before.ipv4, HashAlgorithm.csum16, 16w0, hdr.ipv4, 32w0x10000);
        hash(local.before.tcp, HashAlgorithm.csum16, 16w0, hdr.tcp, 32w0x10000);
        hash(local.before.timestamps, HashAlgorithm.csum16, 16w0, hdr.timestamps, 32w0x10000);
        hash(local.before.tag, HashAlgorithm.csum16, 16w0, hdr.tag, 32w0x10000);
    }

    apply {
        if (local.meta.verdict == PUNT) {
            hdr.packet_in.setValid();
            hdr.packet_in.padding      = 0;
            hdr.packet_in.ingress_port = local.meta.ingress_port;
        } else {
            if (local.meta.verdict == REPLICATE) {
                if (standard.egress_rid != TRAINING_COPY) {
                    local.meta.replication_id = standard.egress_rid;
                    remember();
                    streams.apply(hdr, local.meta);
                }
            } else if (local.meta.group == FLOOD_GROUP) {
                local.meta.egress_port = standard.egress_port;
                never_back.apply(local.meta);
            }
            if (local.meta.verdict == DROP) {
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
        // The pseudo header: what else is in the IPv4 header, its checksum as it came included, cancels out.
        // The segment's length counts through total_length, which differs from it by a constant.
        update_checksum(local.before.isValid(),
            { local.before.tcp, local.before.timestamps, local.before.tag, local.before.ipv4,
              hdr.ipv4.version_words, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.checksum, hdr.ipv4.source, hdr.ipv4.destination,
              hdr.tcp.source_port, hdr.tcp.destination_port, hdr.tcp.sequence, hdr.tcp.acknowledgement,
              hdr.tcp.data_offset, hdr.tcp.flags, hdr.tcp.window, hdr.tcp.urgent_pointer },
            hdr.tcp.checksum, HashAlgorithm.csum16);
        update_checksum(local.before.isValid(),
            { local.before.ipv4,
              hdr.ipv4.version_words, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.source, hdr.ipv4.destination },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
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
