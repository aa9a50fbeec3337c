// SPDX-License-Identifier: Apache-2.0
// Feature `guard`: which source addresses a port may send, so that no host can send in the name of a stub.
// Control plane: controlplane/guard.py. Packet tests: ptf_tests/guard.py.

#ifndef CHECKMATE_GUARD
#define CHECKMATE_GUARD

// Checks IPv4 sources and ARP senders. A port of a job's host accepts only the addresses that the job names for it.
// A link refuses stubs that are not behind it, and any other port refuses what belongs to a job.
control guard(in headers_t hdr, inout metadata_t meta) {
    DIRECT_COUNTER(refused_ports, ".refused_ports");
    DIRECT_COUNTER(refused_addresses, ".refused_addresses");
    INDEXED_COUNTER(hidden, ".hidden", 1);

    @name(".permit")
    action permit() { }

    @name(".sources")
    table sources {
        key = {
            meta.ingress_port : exact @name("port");
            meta.source       : exact @name("address");
        }
        actions = { permit; @defaultonly NoAction; }
        const default_action = NoAction();
        size = SOURCES_TABLE_SIZE;
    }

    @name(".host_port")
    action host_port() {
        refused_ports.count();
        meta.verdict = DROP;
    }

    @name(".link_port")
    action link_port() {
        refused_ports.count();
        meta.from_link = 1;
    }

    // Only looked up if the source is not the port's own.
    @name(".guarded_ports")
    table ports {
        key = { meta.ingress_port : exact @name("port"); }
        actions = { host_port; link_port; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = refused_ports;
        size = PORTS;
    }

    @name(".refuse")
    action refuse() {
        refused_addresses.count();
        meta.verdict = DROP;
    }

    // A stub's address is refused on links too, a host's is not: its path may have several.
    @name(".guarded_addresses")
    table addresses {
        key = {
            meta.source    : exact @name("address");
            meta.from_link : exact @name("from_link");
        }
        actions = { refuse; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = refused_addresses;
        size = ADDRESSES_TABLE_SIZE;
    }

    apply {
        if (meta.hidden == 1) {
            meta.verdict = DROP;
            hidden.count(0);
        } else if (meta.source != 0) {
            if (!sources.apply().hit) {
                ports.apply();
                if (meta.verdict != DROP) {
                    addresses.apply();
                }
            }
        }
    }
}

#endif
