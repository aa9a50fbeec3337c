// SPDX-License-Identifier: Apache-2.0
// Checkmate for v1model (BMv2 and the embedded target): only what the architecture forces.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

#define DIRECT_COUNTER(instance, path) \
    @name(path) direct_counter(CounterType.packets_and_bytes) instance
#define INDEXED_COUNTER(instance, path, size) \
    @name(path) counter<bit<8>>(size, CounterType.packets_and_bytes) instance
#define DIRECT_METER(instance, path) @name(path) direct_meter<color_t>(MeterType.packets) instance
#define INDEXED_METER(instance, path, size) @name(path) meter<port_t>(size, MeterType.packets) instance
#define EXECUTE_DIRECT(instance, color) instance.read(color);
#define EXECUTE_INDEXED(instance, index, color) instance.execute_meter(index, color);
#define METER_RED 2
#define IN_TCAM

#include "include/types.p4"
#include "include/headers.p4"
#include "include/frames.p4"
#include "include/guard.p4"
#include "include/forwarding.p4"
#include "include/stub.p4"
#include "include/replication.p4"
#include "include/ingress.p4"
#include "include/streams.p4"

// The switch's port to its controller: simple_switch_grpc's --cpu-port.
const port_t CPU_PORT = 510;

// The inverted sum of each header of a copy as it came, for the update of checksums by RFC 1624:
// HC' = ~(~HC + ~m + m'); ~(HC + m) is ~HC + ~m. A segment that came damaged leaves damaged, and the shadow node's
// kernel drops it as the trainer's does.
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
            default: frame;
        }
    }

    state from_cpu {
        packet.extract(hdr.packet_out);
        transition accept;
    }

    state frame {
        frame_parser.apply(packet, hdr, local.meta);
        transition accept;
    }
}

control checkmate_ingress(inout headers_t hdr, inout local_t local, inout standard_metadata_t standard) {
    apply {
        if (hdr.packet_out.isValid()) {
            local.meta.egress_port = hdr.packet_out.egress_port;
            hdr.packet_out.setInvalid();
        } else {
            ingress_features.apply(hdr, local.meta);
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
    // Over whole headers, because p4c copies each field of a list into metadata of its own first.
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
            } else if (local.meta.ingress_port != CPU_PORT) {
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
        // The pseudo header: the rest of the IPv4 header, with its checksum as it came, cancels out.
        // The segment's length enters as total_length, which differs from it by a constant.
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
