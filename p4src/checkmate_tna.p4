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
#endif

#include "include/sizes.p4"
#include "include/headers.p4"
#include "include/stub.p4"
#include "include/replication.p4"
#include "include/forwarding.p4"
#include "include/streams.p4"

// The port under which the switch speaks with its controller: the PCIe port of the chip, as a device port.
#ifndef CHECKMATE_CPU_PORT
#if __TARGET_TOFINO__ == 2
#define CHECKMATE_CPU_PORT 0
#else
#define CHECKMATE_CPU_PORT 192 // with two pipes, as 32-port switches have; 320 with four
#endif
#endif
const port_t CPU_PORT = CHECKMATE_CPU_PORT;

// What a checksum is mended for: the fields that a copy's rewrite changes. The parser subtracts them as they
// came, old checksum included, which leaves the residual; the deparser adds them up with it as they leave.
// So a segment that came damaged leaves damaged. total_length also stands for the pseudo header's length.
#define MENDED_IPV4(hdr) hdr.ipv4.total_length, hdr.ipv4.source, hdr.ipv4.destination
#define MENDED_TCP(hdr) \
    hdr.tcp.source_port, hdr.tcp.destination_port, hdr.tcp.sequence, hdr.tcp.acknowledgement, \
    hdr.tcp.data_offset, hdr.tcp.flags, hdr.tcp.window, hdr.tcp.urgent_pointer
#define REMOVED_TIMESTAMPS(hdr) hdr.timestamps.prefix, hdr.timestamps.values
#define REMOVED_TAG(hdr) \
    hdr.tag.prefix, hdr.tag.sequence, hdr.tag.anchor, hdr.tag.shadow_id, hdr.tag.channel, hdr.tag.incarnation

// From ingress to egress, in front of every packet that the controller has no part in. The verdict is apart from
// the port: the two would share a container, which the parser fills with the chip's own metadata, flags and all.
header bridged_t {
    bit<7>     padding;
    port_t     ingress_port;
    bit<6>     more_padding;
    verdict_t  verdict; // FORWARD or REPLICATE
    boundary_t boundary;
}

// A copy's first payload byte, which goes as it came. p4c takes a residual that ends at an 8-bit field which it
// covers, as the tag's last one, for a duplicate, and can't place it.
header first_byte_t {
    bit<8> value;
}

struct ingress_local_t {
    metadata_t meta;
    bridged_t  bridged;
    bit<16>    headers_length; // IPv4's and TCP's, bytes
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
        local.meta.payload_length = 0;
        local.meta.verdict = FORWARD;
        local.headers_length = 0;
        transition select(intrinsic.ingress_port) {
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
            0: words_0;
            1: words_1;
            2: words_2;
            3: words_3;
            4: words_4;
            5: words_5;
            6: words_6;
            7: words_7;
            8: words_8;
            9: words_9;
            10: words_10;
            11: words_11;
            12: words_12;
            13: words_13;
            14: words_14;
            15: words_15;
        }
    }

    // One for each data offset, OFFSET_TAG and OFFSET_TIMESTAMPS_TAG among them: the parser can't shift, and the pipeline would take two stages for it.
#define WORDS(words, next) state words_##words { local.headers_length = 20 + 4 * words; transition next; }
    WORDS(0, accept)
    WORDS(1, accept)
    WORDS(2, accept)
    WORDS(3, accept)
    WORDS(4, accept)
    WORDS(5, accept)
    WORDS(6, accept)
    WORDS(7, accept)
    WORDS(8, accept)
    WORDS(9, first_option)
    WORDS(10, accept)
    WORDS(11, accept)
    WORDS(12, timestamps)
    WORDS(13, accept)
    WORDS(14, accept)
    WORDS(15, accept)

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

control checkmate_ingress(inout headers_t hdr, inout ingress_local_t local,
                          in ingress_intrinsic_metadata_t intrinsic,
                          in ingress_intrinsic_metadata_from_parser_t from_parser,
                          inout ingress_intrinsic_metadata_for_deparser_t for_deparser,
                          inout ingress_intrinsic_metadata_for_tm_t for_tm) {
    // What goes to the controller or comes from it is done here, and takes no part in egress.
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
            if (hdr.tcp.isValid()) {
                local.meta.payload_length = hdr.ipv4.total_length |-| local.headers_length;
            }
            // Before `stub` and `replication`, which overrule it: so none waits for another.
            forwarding.apply(hdr, local.meta);
            stub.apply(hdr, local.meta);
            if (local.meta.verdict == PUNT) {
                end_plain_acks.apply(hdr, local.meta);
            } else {
                replication.apply(hdr, local.meta);
            }

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

// Only shadow copies are parsed beyond the bridged header. That they are tagged segments, ingress has seen.
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
        packet.extract(local.first_byte); // what has no payload isn't replicated
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

// Timestamps and tag never leave: what has them and isn't rewritten is dropped.
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
