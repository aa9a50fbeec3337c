// SPDX-License-Identifier: Apache-2.0
// Feature `replication`: a tagged segment's port and addresses to its boundary, with shadow id and channel to its
// multicast group.
// Control plane: controlplane/replication.py. Packet tests: ptf_tests/replication.py.

#ifndef CHECKMATE_REPLICATION
#define CHECKMATE_REPLICATION

control replication(in headers_t hdr, inout metadata_t meta) {
    DIRECT_COUNTER(replicated_segments, ".replicated_segments");
    INDEXED_COUNTER(passed, ".passed", REASONS);

    // The DSCP values that have a job's tag bit.
    @name(".mark")
    action mark() { }

    @name(".marks")
    table marks {
        key = { hdr.ipv4.dscp : ternary @name("dscp"); }
        actions = { mark; @defaultonly NoAction; }
        const default_action = NoAction();
        size = MARKS_TABLE_SIZE;
    }

    @name(".enter")
    action enter(@name("boundary") boundary_t boundary) {
        meta.boundary = boundary;
    }

    // The key has the port, because only the rank itself is behind it: no other host can send in its name.
    @name(".boundaries") IN_TCAM
    table boundaries {
        key = {
            meta.ingress_port    : exact @name("port");
            hdr.ipv4.source      : exact @name("source");
            hdr.ipv4.destination : exact @name("destination");
        }
        actions = { enter; @defaultonly NoAction; }
        const default_action = NoAction();
        size = BOUNDARY_TABLE_SIZE;
    }

    @name(".replicate")
    action replicate(@name("group") group_t group) {
        replicated_segments.count();
        meta.group   = group;
        meta.verdict = REPLICATE;
    }

    @name(".replication")
    table shards { // the control plane has the feature's name (types.p4)
        key = {
            meta.boundary     : exact @name("boundary");
            hdr.tag.shadow_id : exact @name("shadow_id");
            hdr.tag.channel   : exact @name("channel");
        }
        actions = { replicate; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = replicated_segments;
        size = REPLICATION_TABLE_SIZE;
    }

    apply {
        if (hdr.ipv4.isValid()) {
            if (marks.apply().hit) {
                bit<8> reason = PASSED_WITHOUT_TAG;
                if (hdr.tag.isValid() && meta.payload_length != 0) {
                    reason = PASSED_WITHOUT_ENTRY;
                    if (boundaries.apply().hit) {
                        shards.apply();
                    }
                }
                if (meta.verdict != REPLICATE) {
                    passed.count(reason);
                }
            }
        }
    }
}

#endif
