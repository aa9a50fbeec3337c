// SPDX-License-Identifier: Apache-2.0
// The ingress half of checkmate_tna.p4, unchanged, as a v1model program: the test bed of its meaning.
// In: intrinsic metadata and port metadata, then the frame. Out, through the target's own replication engine:
// whether egress is bypassed, one byte, then what Tofino's ingress deparser makes.

#include "checkmate_tna.p4"
#undef main

header to_egress_t {
    bit<7> padding;
    bit<1> bypass_egress;
}

struct shim_headers_t {
    to_egress_t to_egress;
    bridged_t   bridged;
    headers_t   inner;
}

struct shim_local_t {
    ingress_local_t              local;
    ingress_intrinsic_metadata_t intrinsic;
}

parser shim_parser(packet_in packet, out shim_headers_t hdr, inout shim_local_t local,
                   inout standard_metadata_t standard) {
    state start {
        checkmate_ingress_parser.apply(packet, hdr.inner, local.local, local.intrinsic);
        transition accept;
    }
}

control shim_ingress(inout shim_headers_t hdr, inout shim_local_t local, inout standard_metadata_t standard) {
    ingress_intrinsic_metadata_from_parser_t  from_parser;
    ingress_intrinsic_metadata_for_deparser_t for_deparser;
    ingress_intrinsic_metadata_for_tm_t       for_tm;

    apply {
        from_parser.parser_err = 0;
        for_deparser.drop_ctl = 0;
        for_tm.ucast_egress_port = 0;
        for_tm.mcast_grp_a = 0;
        for_tm.bypass_egress = 0;
        checkmate_ingress.apply(hdr.inner, local.local, local.intrinsic, from_parser, for_deparser, for_tm);
        hdr.bridged = local.local.bridged;
        hdr.to_egress.setValid();
        hdr.to_egress.padding = 0;
        hdr.to_egress.bypass_egress = for_tm.bypass_egress;
        if (for_deparser.drop_ctl != 0) {
            mark_to_drop(standard);
        } else if (for_tm.mcast_grp_a != 0) {
            standard.mcast_grp = for_tm.mcast_grp_a;
        } else {
            standard.egress_spec = for_tm.ucast_egress_port;
        }
    }
}

control shim_egress(inout shim_headers_t hdr, inout shim_local_t local, inout standard_metadata_t standard) {
    apply { }
}

control no_checksums(inout shim_headers_t hdr, inout shim_local_t local) {
    apply { }
}

control shim_deparser(packet_out packet, in shim_headers_t hdr) {
    apply {
        packet.emit(hdr.to_egress);
        emit_ingress.apply(packet, hdr.inner, hdr.bridged);
    }
}

V1Switch(shim_parser(), no_checksums(), shim_ingress(), shim_egress(), no_checksums(), shim_deparser()) main;
