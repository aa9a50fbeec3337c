// SPDX-License-Identifier: Apache-2.0
// Feature `forwarding`: destination MAC to port; unknown and broadcast to the flood group, never back.
// Control plane: controlplane/forwarding.py. Packet tests: ptf_tests/forwarding.py.

#ifndef CHECKMATE_FORWARDING
#define CHECKMATE_FORWARDING

control forwarding(in headers_t hdr, inout metadata_t meta) {
    @name(".forward")
    action forward(@name("port") port_t port) {
        meta.egress_port = port;
    }

    @name(".flood")
    action flood() {
        meta.group = FLOOD_GROUP;
    }

    // As if the packet had to go back: `never_back` drops it.
    @name(".discard")
    action discard() {
        meta.egress_port = meta.ingress_port;
    }

    @name(".forwarding")
    table hosts { // the control plane has the feature's name (types.p4)
        key = { hdr.ethernet.destination : exact @name("mac"); }
        actions = { forward; discard; @defaultonly flood; }
        const default_action = flood();
        size = FORWARDING_TABLE_SIZE;
    }

    apply {
        hosts.apply();
    }
}

// The other half, on the egress side: the group of a flooded packet has every port of the tree, and the copy for the
// port that the packet came from ends here.
control never_back(inout metadata_t meta) {
    apply {
        if (meta.egress_port == meta.ingress_port) {
            meta.verdict = DROP;
        }
    }
}

#endif
