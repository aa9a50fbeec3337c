// SPDX-License-Identifier: Apache-2.0
// Operators, casts, jumps and parser corners that the example programs leave out, in one packet each.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> ether_type; // the output port
}

header option_t {
    bit<8> kind; // 1: another one follows; 2: operands; 3: operands, found by looking ahead; 4: the parser fails
    bit<8> value;
}

header operands_t {
    bit<8>  a;
    bit<8>  b;
    int<8>  s;
    int<8>  t;
    bit<32> w;
    bit<48> x;
    bit<5>  p;
    bit<11> q;
    bit<3>  m;
    int<13> n;
}

header results_t {
    bit<8>  sum;
    bit<8>  difference;
    bit<8>  product;
    bit<8>  saturated_sum;
    bit<8>  saturated_difference;
    int<8>  signed_sum;
    int<8>  signed_product;
    int<8>  signed_saturated;
    int<8>  signed_saturated_difference;
    int<8>  negated;
    bit<8>  inverted;
    bit<8>  shifted_left;
    bit<8>  shifted_right;
    int<8>  signed_shift;
    bit<32> wide_shift;
    bit<32> concatenated;
    bit<8>  sliced;
    bit<48> patched;
    bit<8>  chosen;
    bit<8>  compared;
    bit<8>  logic;
    int<13> narrow;
    bit<3>  low;
    bit<16> quotient;
    bit<16> cast_up;
    bit<16> cast_signed;
    bit<16> hash_crc16;
    bit<32> hash_crc32;
    bit<64> hash_identity;
    bit<16> hash_csum;
    bit<32> hash_xor32;
    bit<16> hash_xor16;
}

struct headers_t {
    ethernet_t ethernet;
    option_t   option;
    operands_t operands;
    operands_t copy;
    results_t  results;
}

struct metadata_t {
    bit<8>  options;
    bit<8>  peeked;
    int<8>  kept;
    bit<16> stamp;
}

error { Asked }

parser read(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition option;
    }
    state option {
        packet.extract(hdr.option);
        meta.options = meta.options + 1;
        verify(hdr.option.kind != 4, error.Asked);
        transition select(hdr.option.kind) {
            1: option;
            2: operands;
            3: peek;
            default: accept;
        }
    }
    state peek {
        meta.peeked = packet.lookahead<operands_t>().b;
        transition select(packet.lookahead<bit<11>>()) {
            0x400 &&& 0x400: skip;
            default: operands;
        }
    }
    state skip {
        packet.advance((bit<32>) hdr.option.value);
        transition operands;
    }
    state operands {
        packet.extract(hdr.operands);
        transition accept;
    }
}

control check(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum_with_payload(hdr.option.isValid() && !hdr.operands.isValid(),
            { hdr.option.kind, 8w0 }, hdr.ethernet.ether_type, HashAlgorithm.csum16);
    }
}

control ingress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    // BMv2 crashes on an index out of bounds, so there is none here.
    register<bit<8>, bit<8>>(16) least;

    action arithmetic() {
        hdr.results.sum = hdr.operands.a + hdr.operands.b;
        hdr.results.difference = hdr.operands.a - hdr.operands.b;
        hdr.results.product = hdr.operands.a * hdr.operands.b;
        hdr.results.saturated_sum = hdr.operands.a |+| hdr.operands.b;
        hdr.results.saturated_difference = hdr.operands.a |-| hdr.operands.b;
        hdr.results.signed_sum = hdr.operands.s + hdr.operands.t;
        hdr.results.signed_product = hdr.operands.s * hdr.operands.t;
        hdr.results.signed_saturated = hdr.operands.s |+| hdr.operands.t;
        hdr.results.signed_saturated_difference = hdr.operands.s |-| hdr.operands.t;
        hdr.results.negated = -hdr.operands.s;
        hdr.results.inverted = ~hdr.operands.a;
        hdr.results.quotient = (hdr.operands.w[15:0] / 16) ^ (hdr.operands.w[31:16] % 64);
    }

    action shifts() {
        hdr.results.shifted_left = hdr.operands.a << hdr.operands.m;
        hdr.results.shifted_right = hdr.operands.a >> hdr.operands.m;
        hdr.results.signed_shift = hdr.operands.s >> hdr.operands.m;
        hdr.results.wide_shift = hdr.operands.w << hdr.operands.b;
    }

    action pieces() {
        hdr.results.concatenated = hdr.operands.q ++ hdr.operands.p ++ hdr.operands.a ++ hdr.operands.b;
        hdr.results.sliced = hdr.operands.x[29:22];
        hdr.results.patched = hdr.operands.x;
        hdr.results.patched[37:11] = hdr.operands.w[26:0];
        hdr.results.narrow = hdr.operands.n + (int<13>) hdr.operands.t;
        hdr.results.low = (bit<3>) hdr.operands.w ^ hdr.operands.m;
        hdr.results.cast_up = (bit<16>) hdr.operands.a;
        hdr.results.cast_signed = (bit<16>) (int<16>) hdr.operands.s;
    }

    // Branches and an exit within an action.
    action branches(bit<8> limit, bit<8> raw_change) {
        int<8> change = (int<8>) raw_change;
        if (hdr.operands.a > limit) {
            hdr.results.chosen = 1;
            if (hdr.operands.s < change) {
                hdr.results.chosen = 2;
            } else {
                meta.kept = change;
            }
        } else {
            hdr.results.chosen = 3;
            if (hdr.operands.b == limit) {
                standard.egress_spec = 1;
                exit;
            }
        }
        hdr.results.logic = (bit<8>) (bit<1>) (hdr.operands.a == hdr.operands.b || hdr.operands.s >= change);
    }

    action nothing() { }

    action invalidate() {
        hdr.operands.setInvalid();
    }

    table ways {
        key = {
            hdr.operands.a : range;
            hdr.operands.p : ternary;
            hdr.copy.isValid() : exact;
        }
        actions = { branches; nothing; invalidate; }
        default_action = branches(100, 0xFB);
        size = 16;
    }

    action note(bit<3> way) {
        hdr.results.low = way;
    }

    // A key of an invalid header is 0, whatever the header held.
    table notes {
        key = { hdr.operands.b : exact; }
        actions = { note; nothing; }
        default_action = nothing();
        size = 16;
    }

    apply {
        standard.egress_spec = hdr.ethernet.ether_type[8:0];
        if (standard.parser_error != error.NoError) {
            meta.stamp = (bit<16>) (bit<8>) (standard.parser_error == error.Asked ? 8w4 : 5);
        }
        if (hdr.operands.isValid()) {
            hdr.results.setValid();
            arithmetic();
            shifts();
            pieces();
            hash(hdr.results.hash_crc16, HashAlgorithm.crc16, 16w5, { hdr.operands.x, hdr.operands.p, hdr.operands.q }, 32w60000);
            hash(hdr.results.hash_crc32, HashAlgorithm.crc32, 32w0, { hdr.operands.w, hdr.operands.m }, 64w0x100000000);
            hash(hdr.results.hash_identity, HashAlgorithm.identity, 64w0, { hdr.operands.a, hdr.operands.b, hdr.operands.x }, 64w0xffffffffffffffff);
            hash(hdr.results.hash_csum, HashAlgorithm.csum16, 16w0, { hdr.operands.a, hdr.operands.w, hdr.operands.n }, 32w65536);
            hash(hdr.results.hash_xor32, HashAlgorithm.xor16, 32w0, { hdr.operands.x, hdr.operands.a }, 32w65536);
            hash(hdr.results.hash_xor16, HashAlgorithm.xor16, 16w1, { hdr.operands.x, hdr.operands.w }, (bit<32>) hdr.operands.b);
            switch (ways.apply().action_run) {
                branches: {
                    hdr.results.compared = hdr.operands.x > 0x800000000000 ? 8w1 : (hdr.operands.n < -7 ? 8w2 : 3);
                }
                invalidate: {
                    hdr.results.compared = 4;
                }
                default: {
                    hdr.copy = hdr.operands;
                    hdr.copy.n = -hdr.copy.n;
                    if (hdr.operands.t < 0) {
                        exit;
                    }
                }
            }
            notes.apply();
            bit<8> stored = 0;
            least.read(stored, hdr.operands.b & 15);
            int<8> before = (int<8>) stored;
            if (hdr.results.signed_sum < before) {
                least.write(hdr.operands.b & 15, (bit<8>) hdr.results.signed_sum);
            }
            meta.kept = meta.kept + before;
        } else {
            hdr.copy = hdr.operands;
        }
    }
}

control egress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    apply {
        hdr.ethernet.source = meta.options ++ meta.peeked ++ (bit<8>) meta.kept ++ meta.stamp
                              ++ 7w0 ++ standard.checksum_error;
        if (hdr.results.isValid() && hdr.results.low == 7) {
            hdr.results.low = (bit<3>) standard.packet_length;
        }
    }
}

control renew(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.results.isValid(),
            { hdr.operands.a, hdr.copy.b, hdr.operands.w, hdr.results.sum, hdr.copy.x, hdr.operands.n, hdr.operands.m },
            hdr.results.quotient, HashAlgorithm.csum16);
    }
}

control write(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.results);
        packet.emit(hdr.operands);
        packet.emit(hdr.copy);
        packet.emit(hdr.option);
    }
}

V1Switch(read(), check(), ingress(), egress(), renew(), write()) main;
