// SPDX-License-Identifier: Apache-2.0
// Constructs that the embedded target refuses; a test expects each with its line.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

header word_t {
    bit<32> value;
}

header label_t {
    bit<32> value;
    varbit<64> rest;
}

struct headers_t {
    word_t    word;
    word_t[2] stack;
    label_t   label;
}

struct metadata_t {
    @field_list(1) bit<8> kept;
    bit<32> drawn;
}

parser read(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    value_set<bit<32>>(4) known;
    state start {
        packet.extract(hdr.word);
        transition select(hdr.word.value) {
            known: stack;
            1: label;
            default: accept;
        }
    }
    state stack {
        packet.extract(hdr.stack.next);
        transition accept;
    }
    state label {
        packet.extract(hdr.label, 32);
        transition accept;
    }
}

control check(inout headers_t hdr, inout metadata_t meta) { apply { } }

control ingress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    meter<bit<32>>(8, MeterType.packets) pace;
    action_selector(HashAlgorithm.crc16, 16, 8) members;
    action send(bit<9> port) {
        standard.egress_spec = port;
    }
    table balanced {
        key = { hdr.word.value: selector; standard.ingress_port: exact; }
        actions = { send; }
        implementation = members;
    }
    table aging {
        key = { hdr.word.value: exact; }
        actions = { send; }
        support_timeout = true;
    }
    apply {
        balanced.apply();
        aging.apply();
        pace.execute_meter(0, meta.drawn);
        random(meta.drawn, 0, 9);
        hash(meta.drawn, HashAlgorithm.random, 32w0, { hdr.word.value }, 32w10);
        digest<metadata_t>(1, meta);
        clone_preserving_field_list(CloneType.I2E, 5, 1);
        resubmit_preserving_field_list(1);
        truncate(64);
        standard.priority = 3;
        assert(hdr.word.isValid());
    }
}

control egress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    apply {
        recirculate_preserving_field_list(1);
    }
}

control renew(inout headers_t hdr, inout metadata_t meta) { apply { } }

control write(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.word);
        packet.emit(hdr.stack);
        packet.emit(hdr.label);
    }
}

V1Switch(read(), check(), ingress(), egress(), renew(), write()) main;
