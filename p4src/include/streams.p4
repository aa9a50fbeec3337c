// SPDX-License-Identifier: Apache-2.0
// Feature `streams`: the rewrite of a shadow copy into the shadow node's own TCP stream.
// Control plane: controlplane/streams.py. Packet tests: ptf_tests/streams.py.

#ifndef CHECKMATE_STREAMS
#define CHECKMATE_STREAMS

// Only for shadow copies, on the egress side.
control streams(inout headers_t hdr, inout metadata_t meta) {
    DIRECT_COUNTER(stream_segments, ".stream_segments");
    DIRECT_COUNTER(lost_segments, ".lost_segments");
    INDEXED_COUNTER(losses, ".losses", REASONS);

    // `minus_base` is -base mod 2^32: Tofino adds action data, but can't subtract it.
    @name(".rewrite")
    action rewrite(@name("shadow_mac") bit<48> shadow_mac, @name("stub_mac") bit<48> stub_mac,
                   @name("shadow_ip") bit<32> shadow_ip, @name("stub_ip") bit<32> stub_ip,
                   @name("shadow_port") bit<16> shadow_port, @name("stub_port") bit<16> stub_port,
                   @name("acknowledgement") bit<32> acknowledgement,
                   @name("minus_base") bit<32> minus_base) {
        stream_segments.count();
        hdr.ethernet.destination = shadow_mac;
        hdr.ethernet.source      = stub_mac;
        hdr.ipv4.destination     = shadow_ip;
        hdr.ipv4.source          = stub_ip;
        hdr.tcp.destination_port = shadow_port;
        hdr.tcp.source_port      = stub_port;
        hdr.tcp.sequence         = hdr.tcp.sequence + minus_base;
        hdr.tcp.acknowledgement  = acknowledgement;
    }

    @name(".streams")
    table connections { // the control plane has the feature's name (types.p4)
        key = {
            meta.boundary       : exact @name("boundary");
            hdr.tag.channel     : exact @name("channel");
            hdr.tag.shadow_id   : exact @name("shadow_id");
            hdr.tag.incarnation : exact @name("incarnation");
            meta.replication_id : exact @name("replication_id");
        }
        actions = { rewrite; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = stream_segments;
        size = STREAMS_TABLE_SIZE;
    }

    // A boundary's current incarnation, from the newest hello.
    @name(".expect")
    action expect(@name("incarnation") bit<8> incarnation) {
        meta.incarnation = incarnation;
    }

    @name(".incarnations") IN_TCAM
    table incarnations {
        key = { meta.boundary : exact @name("boundary"); }
        actions = { expect; @defaultonly NoAction; }
        const default_action = NoAction();
        size = BOUNDARY_TABLE_SIZE;
    }

    @name(".lose")
    action lose() {
        lost_segments.count();
    }

    // An entry for each stream of a job, connected or not, counts its lost segments. `connections` can't: it has no
    // entry for a stream that is not connected, and its key includes the incarnation.
    @name(".lost")
    table lost {
        key = {
            meta.boundary       : exact @name("boundary");
            hdr.tag.channel     : exact @name("channel");
            hdr.tag.shadow_id   : exact @name("shadow_id");
            meta.replication_id : exact @name("replication_id");
        }
        actions = { lose; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = lost_segments;
        size = STREAMS_TABLE_SIZE;
    }

    action strip_options() {
        hdr.tag.setInvalid();
        hdr.timestamps.setInvalid();
        hdr.tcp.data_offset    = 5;
        hdr.tcp.flags[11:4]    = TCP_ACK[11:4]; // all but PSH, which stays as it came
        hdr.tcp.flags[2:0]     = 0;
        hdr.tcp.window         = 65535;
        hdr.tcp.urgent_pointer = 0;
    }

    apply {
        if (connections.apply().hit) {
            // `rewrite` has added -base. Only the second line waits for the first.
            hdr.tag.sequence = hdr.tag.sequence - hdr.tag.anchor;
            hdr.tcp.sequence = hdr.tcp.sequence + hdr.tag.sequence;
            if (hdr.timestamps.isValid()) {
                hdr.ipv4.total_length = hdr.ipv4.total_length - TIMESTAMPS_TAG_BYTES;
            } else {
                hdr.ipv4.total_length = hdr.ipv4.total_length - TAG_BYTES;
            }
            strip_options();
        } else {
            meta.verdict = DROP;
            meta.incarnation = hdr.tag.incarnation; // unless a hello has named another
            incarnations.apply();
            if (meta.incarnation == hdr.tag.incarnation) {
                losses.count(LOST_NOT_CONNECTED);
                lost.apply();
            } else {
                losses.count(LOST_OLD_INCARNATION);
            }
        }
    }
}

#endif
