// One table of each match kind, for the tests of the P4Runtime service. Compiled like p4src: see its README.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

typedef bit<9> port_t;
const port_t CPU_PORT = 510;

@controller_header("packet_in")
header packet_in_t {
    bit<7> padding;
    port_t ingress_port;
}

@controller_header("packet_out")
header packet_out_t {
    bit<7> padding;
    port_t egress_port;
}

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> kind;
}

struct headers_t {
    packet_in_t  packet_in;
    packet_out_t packet_out;
    ethernet_t   ethernet;
}

struct local_t { }

parser start_parser(packet_in packet, out headers_t hdr, inout local_t local,
                    inout standard_metadata_t standard) {
    state start {
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
        transition accept;
    }
}

control ingress(inout headers_t hdr, inout local_t local, inout standard_metadata_t standard) {
    @name(".hits") direct_counter(CounterType.packets_and_bytes) hits;
    @name(".seen") counter<bit<4>>(8, CounterType.packets_and_bytes) seen;
    @name(".cells") register<bit<32>, bit<32>>(4) cells;

    @name(".forward") action forward(@name("port") port_t port) {
        standard.egress_spec = port;
    }
    @name(".counted") action counted(@name("port") port_t port) {
        hits.count();
        standard.egress_spec = port;
    }
    @name(".replicate") action replicate(@name("group") bit<16> group) {
        standard.mcast_grp = group;
    }
    @name(".punt") action punt() {
        standard.egress_spec = CPU_PORT;
    }
    @name(".drop") action drop() {
        mark_to_drop(standard);
    }

    @name(".by_mac") table by_mac {
        key = {
            hdr.ethernet.destination : exact @name("mac");
            standard.ingress_port : exact @name("port");
        }
        actions = { counted; replicate; punt; drop; }
        default_action = drop();
        counters = hits;
        size = 16384;
    }
    @name(".by_prefix") table by_prefix {
        key = { hdr.ethernet.destination : lpm @name("prefix"); }
        actions = { forward; @tableonly drop; @defaultonly NoAction; }
        default_action = NoAction();
        size = 4;
    }
    @name(".by_mask") table by_mask {
        key = {
            hdr.ethernet.kind : ternary @name("kind");
            hdr.ethernet.source : optional @name("source");
        }
        actions = { forward; NoAction; }
        const default_action = NoAction();
        size = 64;
    }
    @name(".by_range") table by_range {
        key = { hdr.ethernet.kind : range @name("kind"); }
        actions = { forward; NoAction; }
        size = 64;
    }
    @name(".fixed") table fixed {
        key = { hdr.ethernet.kind : exact @name("kind"); }
        actions = { forward; NoAction; }
        const entries = { 0x88CC : forward(7); }
        default_action = NoAction();
    }
    @name(".keyless") table keyless {
        actions = { forward; NoAction; }
        default_action = NoAction();
    }

    apply {
        if (hdr.packet_out.isValid()) {
            standard.egress_spec = hdr.packet_out.egress_port;
            hdr.packet_out.setInvalid();
        } else {
            bit<32> value;
            seen.count((bit<4>) standard.ingress_port & 7);
            cells.read(value, 0);
            cells.write(0, value + 1);
            by_mac.apply();
            by_prefix.apply();
            by_mask.apply();
            by_range.apply();
            fixed.apply();
            keyless.apply();
        }
    }
}

control egress(inout headers_t hdr, inout local_t local, inout standard_metadata_t standard) {
    apply {
        if (standard.egress_port == CPU_PORT) {
            hdr.packet_in.setValid();
            hdr.packet_in.padding = 0;
            hdr.packet_in.ingress_port = standard.ingress_port;
        }
    }
}

control verify_nothing(inout headers_t hdr, inout local_t local) { apply { } }
control compute_nothing(inout headers_t hdr, inout local_t local) { apply { } }
control deparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
    }
}

V1Switch(start_parser(), verify_nothing(), ingress(), egress(), compute_nothing(), deparser()) main;
