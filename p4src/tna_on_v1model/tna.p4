// SPDX-License-Identifier: Apache-2.0
// Replaces the vendor's tna.p4, so that the unchanged checkmate_tna.p4 compiles for v1model: the parts of the
// architecture that it uses. Intrinsic metadata are prefixes of the packet here too.

#ifndef CHECKMATE_SHIM_TNA
#define CHECKMATE_SHIM_TNA

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

const bit<32> PORT_METADATA_SIZE = 64;

header ingress_intrinsic_metadata_t {
    bit<7>  before_port;
    bit<9>  ingress_port;
    bit<48> ingress_mac_tstamp;
}

struct ingress_intrinsic_metadata_from_parser_t {
    bit<16> parser_err;
}

struct ingress_intrinsic_metadata_for_deparser_t {
    bit<3> drop_ctl;
}

struct ingress_intrinsic_metadata_for_tm_t {
    bit<9>  ucast_egress_port;
    bit<16> mcast_grp_a;
    bit<1>  bypass_egress;
}

// Only the fields that are read, with padding between them.
header egress_intrinsic_metadata_t {
    bit<7>   before_port;
    bit<9>   egress_port;
    bit<120> before_rid;
    bit<16>  egress_rid;
    bit<64>  after_rid;
}

struct egress_intrinsic_metadata_from_parser_t {
    bit<16> parser_err;
}

struct egress_intrinsic_metadata_for_deparser_t {
    bit<3> drop_ctl;
}

struct egress_intrinsic_metadata_for_output_port_t {
    bit<1> capture_tstamp_on_tx;
}

parser ingress_parser_t<H, M>(packet_in packet, out H hdr, out M local, out ingress_intrinsic_metadata_t i);
control ingress_t<H, M>(inout H hdr, inout M local, in ingress_intrinsic_metadata_t i,
                        in ingress_intrinsic_metadata_from_parser_t p,
                        inout ingress_intrinsic_metadata_for_deparser_t d,
                        inout ingress_intrinsic_metadata_for_tm_t t);
control ingress_deparser_t<H, M>(packet_out packet, inout H hdr, in M local,
                                 in ingress_intrinsic_metadata_for_deparser_t d);
parser egress_parser_t<H, M>(packet_in packet, out H hdr, out M local, out egress_intrinsic_metadata_t i);
control egress_t<H, M>(inout H hdr, inout M local, in egress_intrinsic_metadata_t i,
                       in egress_intrinsic_metadata_from_parser_t p,
                       inout egress_intrinsic_metadata_for_deparser_t d,
                       inout egress_intrinsic_metadata_for_output_port_t o);
control egress_deparser_t<H, M>(packet_out packet, inout H hdr, in M local,
                                in egress_intrinsic_metadata_for_deparser_t d);

package Pipeline<IH, IM, EH, EM>(ingress_parser_t<IH, IM> ip, ingress_t<IH, IM> i, ingress_deparser_t<IH, IM> id,
                                 egress_parser_t<EH, EM> ep, egress_t<EH, EM> e, egress_deparser_t<EH, EM> ed);
package Switch<IH, IM, EH, EM>(Pipeline<IH, IM, EH, EM> pipe);

// BMv2 can't subtract from checksums in a parser, or update them in a deparser: egress.p4 does both with v1model's
// externs, over the same lists of fields.
header no_checksum_t {
    bit<16> sum;
}
#define Checksum() no_checksum_t
#define subtract(...) setInvalid()
#define subtract_all_and_deposit(...) setInvalid()
#define update(...) sum

// The program's own `main` is a package of the above. Nothing runs it.
#define main tofino_main

#endif
