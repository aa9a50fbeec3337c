// SPDX-License-Identifier: Apache-2.0
// Headers, and the one struct of metadata that the features read and write.

#ifndef CHECKMATE_HEADERS
#define CHECKMATE_HEADERS

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<16> ETHERTYPE_ARP  = 0x0806;
const bit<16> ETHERTYPE_VLAN = 0x8100;
const bit<16> ETHERTYPE_SERVICE_VLAN = 0x88A8;
const bit<16> VLAN_ID_MASK   = 0x0FFF;
const bit<8>  PROTOCOL_TCP   = 6;
const bit<16> ARP_REQUEST    = 1;

// The first byte of an IPv4 header without options, and the bits that are 0 unless the packet is a fragment.
const bit<8>  IPV4_WITHOUT_OPTIONS = 0x45;
const bit<16> FRAGMENT_MASK        = 0x3FFF;

const bit<12> TCP_FIN = 0x001;
const bit<12> TCP_SYN = 0x002;
const bit<12> TCP_RST = 0x004;
const bit<12> TCP_ACK = 0x010;

// First words of the two TCP options that a tagged segment may carry.
const bit<32> TAG_PREFIX        = 0xFD10C4EC; // kind 253, length 16, ExID 0xC4EC (RFC 6994)
const bit<32> TIMESTAMPS_PREFIX = 0x0101080A; // NOP, NOP, kind 8, length 10 (RFC 7323)
// Data offsets of the two layouts: the tag alone, or the tag behind timestamps.
const bit<4>  OFFSET_TAG            = 9;
const bit<4>  OFFSET_TIMESTAMPS_TAG = 12;
const bit<16> TAG_BYTES             = 16;
const bit<16> TIMESTAMPS_TAG_BYTES  = 28;

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
    bit<16> ether_type;
}

header arp_t {
    bit<16> hardware_type;
    bit<16> protocol_type;
    bit<8>  hardware_length;
    bit<8>  protocol_length;
    bit<16> operation;
    bit<48> sender_mac;
    bit<32> sender_ip;
    bit<48> target_mac;
    bit<32> target_ip;
}

header ipv4_t {
    bit<8>  version_words; // version, and the header's length in 32-bit words
    bit<6>  dscp;
    bit<2>  ecn;
    bit<16> total_length;
    bit<16> identification;
    bit<16> fragment;      // reserved, don't fragment, more fragments, 13 bits of offset
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> source;
    bit<32> destination;
}

header tcp_t {
    bit<16> source_port;
    bit<16> destination_port;
    bit<32> sequence;
    bit<32> acknowledgement;
    bit<4>  data_offset;
    bit<12> flags;         // 4 reserved bits, then the 8 flags
    bit<16> window;
    bit<16> checksum;
    bit<16> urgent_pointer;
}

header timestamps_t {
    bit<32> prefix;
    bit<64> values; // TSval and TSecr
}

header tag_t {
    bit<32> prefix;
    bit<32> sequence;
    bit<32> anchor;
    bit<16> shadow_id;
    bit<8>  channel;
    bit<8>  incarnation;
}

struct headers_t {
    packet_in_t  packet_in;
    packet_out_t packet_out;
    ethernet_t   ethernet;
    arp_t        arp;
    ipv4_t       ipv4;
    tcp_t        tcp;
    timestamps_t timestamps;
    tag_t        tag;
}

struct metadata_t {
    port_t           ingress_port;
    port_t           egress_port;
    group_t          group;          // 0: unicast
    boundary_t       boundary;       // of a segment between a boundary's addresses
    replication_id_t replication_id; // of this copy; set on the egress side
    bit<32>          source;         // IPv4 source or ARP sender, otherwise 0
    bit<16>          headers_length; // of IPv4 and TCP, bytes
    bit<16>          payload_length; // of the TCP segment, bytes
    bit<8>           incarnation;    // the boundary's current one
    color_t          color;          // of the meter of a packet for the controller
    bit<1>           hidden;         // in a frame with VLAN id 0
    bit<1>           from_link;      // from another switch
    verdict_t        verdict;
}

#endif
