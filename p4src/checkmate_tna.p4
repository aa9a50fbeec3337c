// SPDX-License-Identifier: Apache-2.0
// Checkmate for TNA (Tofino and Tofino 2): only what the architecture forces.

#include <core.p4>
#if __TARGET_TOFINO__ == 2
#include <t2na.p4>
#else
#include <tna.p4>
#endif

#ifndef DIRECT_COUNTER
#define DIRECT_COUNTER(instance, path) \
    @name(path) DirectCounter<bit<32>>(CounterType_t.PACKETS_AND_BYTES) instance
#define INDEXED_COUNTER(instance, path, size) \
    @name(path) Counter<bit<32>, bit<8>>(size, CounterType_t.PACKETS_AND_BYTES) instance
#define DIRECT_METER(instance, path) @name(path) DirectMeter(MeterType_t.PACKETS) instance
#define INDEXED_METER(instance, path, size) @name(path) Meter<port_t>(size, MeterType_t.PACKETS) instance
#define EXECUTE_DIRECT(instance, color) color = instance.execute();
#define EXECUTE_INDEXED(instance, index, color) color = instance.execute(index);
#define METER_RED 3
#endif

// For small exact tables: in SRAM, each takes four blocks at least, with counters and meters to match.
#ifndef IN_TCAM
#define IN_TCAM @ternary(1)
#endif

#define PARSER_CANNOT_SHIFT // and the pipeline would need two stages for it
#include "include/types.p4"
#include "include/headers.p4"
#include "include/frames.p4"
#include "include/guard.p4"
#include "include/forwarding.p4"
#include "include/stub.p4"
#include "include/replication.p4"
#include "include/ingress.p4"
#include "include/streams.p4"

// The switch's port to its controller: the PCIe port of the chip, as a device port.
#ifndef CHECKMATE_CPU_PORT
#if __TARGET_TOFINO__ == 2
#define CHECKMATE_CPU_PORT 0
#else
#define CHECKMATE_CPU_PORT 192 // of a chip with two pipes, in switches with 32 ports; 320 with four
#endif
#endif
const port_t CPU_PORT = CHECKMATE_CPU_PORT;

// The fields that a copy's rewrite changes, for the update of checksums. The parser subtracts them as they came, with
// the old checksum, which leaves the residual. The deparser adds them to it as they leave. So a segment that came
// damaged leaves damaged. total_length also stands for the pseudo header's length.
#define MENDED_IPV4(hdr) hdr.ipv4.total_length, hdr.ipv4.source, hdr.ipv4.destination
#define MENDED_TCP(hdr) \
    hdr.tcp.source_port, hdr.tcp.destination_port, hdr.tcp.sequence, hdr.tcp.acknowledgement, \
    hdr.tcp.data_offset, hdr.tcp.flags, hdr.tcp.window, hdr.tcp.urgent_pointer
#define REMOVED_TIMESTAMPS(hdr) hdr.timestamps.prefix, hdr.timestamps.values
#define REMOVED_TAG(hdr) \
    hdr.tag.prefix, hdr.tag.sequence, hdr.tag.anchor, hdr.tag.shadow_id, hdr.tag.channel, hdr.tag.incarnation

// From ingress to egress, before every packet that is not to or from the controller. The verdict is apart from the
// port: the two would share a container, which the parser fills with the chip's own metadata and its flags.
header bridged_t {
    bit<7>     padding;
    port_t     ingress_port;
    bit<6>     more_padding;
    verdict_t  verdict; // FORWARD or REPLICATE
    boundary_t boundary;
}

// A copy's first payload byte, which leaves as it came. p4c mistakes a residual that ends at an 8-bit field, such as the
// tag's last one, for a duplicate, and can't place it.
header first_byte_t {
    bit<8> value;
}

struct ingress_local_t {
    metadata_t meta;
    bridged_t  bridged;
}

struct egress_local_t {
    metadata_t   meta;
    bridged_t    bridged;
    first_byte_t first_byte;
    bit<16>      ipv4_residual;
    bit<16>      tcp_residual;
}

parser checkmate_ingress_parser(packet_in packet, out headers_t hdr, out ingress_local_t local,
                                out ingress_intrinsic_metadata_t intrinsic) {
    state start {
        packet.extract(intrinsic);
        packet.advance(PORT_METADATA_SIZE);
        local.meta.ingress_port = intrinsic.ingress_port;
        local.meta.egress_port = 0;
        local.meta.group = 0;
        local.meta.boundary = 0;
        local.meta.source = 0;
        local.meta.headers_length = 0;
        local.meta.payload_length = 0;
        local.meta.color = 0;
        local.meta.hidden = 0;
        local.meta.from_link = 0;
        local.meta.verdict = FORWARD;
        transition select(intrinsic.ingress_port) {
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

control checkmate_ingress(inout headers_t hdr, inout ingress_local_t local,
                          in ingress_intrinsic_metadata_t intrinsic,
                          in ingress_intrinsic_metadata_from_parser_t from_parser,
                          inout ingress_intrinsic_metadata_for_deparser_t for_deparser,
                          inout ingress_intrinsic_metadata_for_tm_t for_tm) {
    // Packets to and from the controller bypass the egress side.
    action to_cpu() {
        hdr.packet_in.setValid();
        hdr.packet_in.padding      = 0;
        hdr.packet_in.ingress_port = local.meta.ingress_port;
        for_tm.ucast_egress_port   = CPU_PORT;
        for_tm.bypass_egress       = 1;
    }

    action from_cpu() {
        for_tm.ucast_egress_port = hdr.packet_out.egress_port;
        for_tm.bypass_egress     = 1;
        hdr.packet_out.setInvalid();
    }

    action bridge() {
        local.bridged.setValid();
        local.bridged.padding      = 0;
        local.bridged.ingress_port = local.meta.ingress_port;
        local.bridged.more_padding = 0;
        local.bridged.verdict      = local.meta.verdict;
        local.bridged.boundary     = local.meta.boundary;
    }

    apply {
        if (hdr.packet_out.isValid()) {
            from_cpu();
        } else {
            ingress_features.apply(hdr, local.meta);
            if (local.meta.verdict == DROP) {
                for_deparser.drop_ctl = 1;
            } else if (local.meta.verdict == PUNT) {
                to_cpu();
            } else {
                bridge();
                if (local.meta.group != 0) {
                    for_tm.mcast_grp_a = local.meta.group;
                } else {
                    for_tm.ucast_egress_port = local.meta.egress_port;
                }
            }
        }
    }
}

control emit_ingress(packet_out packet, in headers_t hdr, in bridged_t bridged) {
    apply {
        packet.emit(bridged);
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.arp);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.tcp);
        packet.emit(hdr.timestamps);
        packet.emit(hdr.tag);
    }
}

control checkmate_ingress_deparser(packet_out packet, inout headers_t hdr, in ingress_local_t local,
                                   in ingress_intrinsic_metadata_for_deparser_t for_deparser) {
    apply {
        emit_ingress.apply(packet, hdr, local.bridged);
    }
}

// Only shadow copies are parsed beyond the bridged header. Ingress has checked that they are tagged segments.
parser checkmate_egress_parser(packet_in packet, out headers_t hdr, out egress_local_t local,
                               out egress_intrinsic_metadata_t intrinsic) {
    Checksum() ipv4_sum;
    Checksum() tcp_sum;

    state start {
        packet.extract(intrinsic);
        packet.extract(local.bridged);
        local.meta.ingress_port   = local.bridged.ingress_port;
        local.meta.egress_port    = intrinsic.egress_port;
        local.meta.replication_id = intrinsic.egress_rid;
        local.meta.boundary       = local.bridged.boundary;
        local.meta.verdict        = local.bridged.verdict;
        transition select(local.bridged.verdict, intrinsic.egress_rid) {
            (REPLICATE, TRAINING_COPY): accept;
            (REPLICATE, _): ethernet;
            default: accept;
        }
    }

    state ethernet {
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        ipv4_sum.subtract({ MENDED_IPV4(hdr), hdr.ipv4.checksum });
        tcp_sum.subtract({ MENDED_IPV4(hdr) });
        transition tcp;
    }

    state tcp {
        packet.extract(hdr.tcp);
        tcp_sum.subtract({ MENDED_TCP(hdr), hdr.tcp.checksum });
        transition select(hdr.tcp.data_offset) {
            OFFSET_TIMESTAMPS_TAG: timestamps;
            default: tag;
        }
    }

    state timestamps {
        packet.extract(hdr.timestamps);
        tcp_sum.subtract({ REMOVED_TIMESTAMPS(hdr) });
        transition tag;
    }

    state tag {
        packet.extract(hdr.tag);
        tcp_sum.subtract({ REMOVED_TAG(hdr) });
        packet.extract(local.first_byte); // segments without payload are not replicated
        ipv4_sum.subtract_all_and_deposit(local.ipv4_residual);
        tcp_sum.subtract_all_and_deposit(local.tcp_residual);
        transition accept;
    }
}

control checkmate_egress(inout headers_t hdr, inout egress_local_t local,
                         in egress_intrinsic_metadata_t intrinsic,
                         in egress_intrinsic_metadata_from_parser_t from_parser,
                         inout egress_intrinsic_metadata_for_deparser_t for_deparser,
                         inout egress_intrinsic_metadata_for_output_port_t for_port) {
    apply {
        if (local.meta.verdict == REPLICATE) {
            if (local.meta.replication_id != TRAINING_COPY) {
                streams.apply(hdr, local.meta);
            }
        } else {
            never_back.apply(local.meta);
        }
        if (local.meta.verdict == DROP) {
            for_deparser.drop_ctl = 1;
        }
    }
}

// Timestamps and tag never leave: a copy that is not rewritten is dropped.
control emit_egress(packet_out packet, in headers_t hdr, in first_byte_t first_byte) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.tcp);
        packet.emit(first_byte);
    }
}

control checkmate_egress_deparser(packet_out packet, inout headers_t hdr, in egress_local_t local,
                                  in egress_intrinsic_metadata_for_deparser_t for_deparser) {
    Checksum() ipv4_sum;
    Checksum() tcp_sum;

    apply {
        if (hdr.ipv4.isValid()) {
            hdr.ipv4.checksum = ipv4_sum.update({ MENDED_IPV4(hdr), local.ipv4_residual });
        }
        if (hdr.tcp.isValid()) {
            hdr.tcp.checksum = tcp_sum.update({ MENDED_IPV4(hdr), MENDED_TCP(hdr), local.tcp_residual });
        }
        emit_egress.apply(packet, hdr, local.first_byte);
    }
}

Pipeline(checkmate_ingress_parser(), checkmate_ingress(), checkmate_ingress_deparser(),
         checkmate_egress_parser(), checkmate_egress(), checkmate_egress_deparser()) pipe;

Switch(pipe) main;
