// SPDX-License-Identifier: Apache-2.0
// The egress half of checkmate_tna.p4, unchanged, as a v1model program: the test bed of its meaning.
// In: egress intrinsic metadata, then what the ingress deparser made. Out: the frame, by the port that the
// metadata name.

#include "checkmate_tna.p4"
#undef main

struct shim_headers_t {
    headers_t    inner;
    first_byte_t first_byte;
}

struct shim_local_t {
    egress_local_t              local;
    egress_intrinsic_metadata_t intrinsic;
}

parser shim_parser(packet_in packet, out shim_headers_t hdr, inout shim_local_t local,
                   inout standard_metadata_t standard) {
    state start {
        checkmate_egress_parser.apply(packet, hdr.inner, local.local, local.intrinsic);
        transition accept;
    }
}

control shim_ingress(inout shim_headers_t hdr, inout shim_local_t local, inout standard_metadata_t standard) {
    apply {
        standard.egress_spec = local.intrinsic.egress_port;
    }
}

control shim_egress(inout shim_headers_t hdr, inout shim_local_t local, inout standard_metadata_t standard) {
    egress_intrinsic_metadata_from_parser_t     from_parser;
    egress_intrinsic_metadata_for_deparser_t    for_deparser;
    egress_intrinsic_metadata_for_output_port_t for_port;

    // The residuals, which Tofino's parser has by now: what was subtracted, and an inverted sum is one subtracted.
    action leave_residuals() {
        hash(local.local.ipv4_residual, HashAlgorithm.csum16, 16w0,
             { MENDED_IPV4(hdr.inner), hdr.inner.ipv4.checksum }, 32w0x10000);
        hash(local.local.tcp_residual, HashAlgorithm.csum16, 16w0,
             { MENDED_IPV4(hdr.inner), MENDED_TCP(hdr.inner), hdr.inner.tcp.checksum, REMOVED_TAG(hdr.inner) },
             32w0x10000);
    }

    action leave_residuals_with_timestamps() {
        hash(local.local.ipv4_residual, HashAlgorithm.csum16, 16w0,
             { MENDED_IPV4(hdr.inner), hdr.inner.ipv4.checksum }, 32w0x10000);
        hash(local.local.tcp_residual, HashAlgorithm.csum16, 16w0,
             { MENDED_IPV4(hdr.inner), MENDED_TCP(hdr.inner), hdr.inner.tcp.checksum,
               REMOVED_TIMESTAMPS(hdr.inner), REMOVED_TAG(hdr.inner) }, 32w0x10000);
    }

    apply {
        from_parser.parser_err = 0;
        for_deparser.drop_ctl = 0;
        for_port.capture_tstamp_on_tx = 0;
        if (hdr.inner.timestamps.isValid()) {
            leave_residuals_with_timestamps();
        } else if (hdr.inner.tag.isValid()) {
            leave_residuals();
        }
        checkmate_egress.apply(hdr.inner, local.local, local.intrinsic, from_parser, for_deparser, for_port);
        hdr.first_byte = local.local.first_byte;
        if (for_deparser.drop_ctl != 0) {
            mark_to_drop(standard);
        }
    }
}

control no_verification(inout shim_headers_t hdr, inout shim_local_t local) {
    apply { }
}

control mend_checksums(inout shim_headers_t hdr, inout shim_local_t local) {
    apply {
        update_checksum(hdr.inner.ipv4.isValid(), { MENDED_IPV4(hdr.inner), local.local.ipv4_residual },
                        hdr.inner.ipv4.checksum, HashAlgorithm.csum16);
        update_checksum(hdr.inner.tcp.isValid(),
                        { MENDED_IPV4(hdr.inner), MENDED_TCP(hdr.inner), local.local.tcp_residual },
                        hdr.inner.tcp.checksum, HashAlgorithm.csum16);
    }
}

control shim_deparser(packet_out packet, in shim_headers_t hdr) {
    apply {
        emit_egress.apply(packet, hdr.inner, hdr.first_byte);
    }
}

V1Switch(shim_parser(), no_verification(), shim_ingress(), shim_egress(), mend_checksums(), shim_deparser()) main;
