// SPDX-License-Identifier: Apache-2.0
// The parse graph of arriving frames, from Ethernet to the tag.

#ifndef CHECKMATE_FRAMES
#define CHECKMATE_FRAMES

const bit<16> IPV4_BYTES = 20;

parser frame_parser(packet_in packet, inout headers_t hdr, inout metadata_t meta) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4: ipv4;
            ETHERTYPE_ARP: arp;
            ETHERTYPE_VLAN: vlan;
            ETHERTYPE_SERVICE_VLAN: vlan;
            default: accept;
        }
    }

    // A receiver takes a frame with VLAN id 0 for one without a VLAN (IEEE 802.1Q, 6.9.1).
    state vlan {
        transition select(packet.lookahead<bit<16>>()) {
            0 &&& VLAN_ID_MASK: hidden;
            default: accept;
        }
    }

    state hidden {
        meta.hidden = 1;
        transition accept;
    }

    state arp {
        packet.extract(hdr.arp);
        meta.source = hdr.arp.sender_ip;
        transition accept;
    }

    state ipv4 {
        packet.extract(hdr.ipv4);
        meta.source = hdr.ipv4.source;
        transition select(hdr.ipv4.version_words, hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (IPV4_WITHOUT_OPTIONS, 0 &&& FRAGMENT_MASK, PROTOCOL_TCP): tcp;
            default: accept;
        }
    }

#ifndef PARSER_CANNOT_SHIFT
    state tcp {
        packet.extract(hdr.tcp);
        meta.headers_length = IPV4_BYTES + (bit<16>) (hdr.tcp.data_offset ++ 2w0);
        transition select(hdr.tcp.data_offset) {
            OFFSET_TAG: first_option;
            OFFSET_TIMESTAMPS_TAG: timestamps;
            default: accept;
        }
    }
#else
    state tcp {
        packet.extract(hdr.tcp);
        transition select(hdr.tcp.data_offset) {
            OFFSET_TAG: with_tag;
            OFFSET_TIMESTAMPS_TAG: with_timestamps;
            0: words_0;
            1: words_1;
            2: words_2;
            3: words_3;
            4: words_4;
            5: words_5;
            6: words_6;
            7: words_7;
            8: words_8;
            10: words_10;
            11: words_11;
            13: words_13;
            14: words_14;
            15: words_15;
        }
    }

#define WORDS(name, words, next) \
    state name { \
        meta.headers_length = IPV4_BYTES + 4 * (bit<16>) words; \
        transition next; \
    }
    WORDS(with_tag, OFFSET_TAG, first_option)
    WORDS(with_timestamps, OFFSET_TIMESTAMPS_TAG, timestamps)
    WORDS(words_0, 0, accept)
    WORDS(words_1, 1, accept)
    WORDS(words_2, 2, accept)
    WORDS(words_3, 3, accept)
    WORDS(words_4, 4, accept)
    WORDS(words_5, 5, accept)
    WORDS(words_6, 6, accept)
    WORDS(words_7, 7, accept)
    WORDS(words_8, 8, accept)
    WORDS(words_10, 10, accept)
    WORDS(words_11, 11, accept)
    WORDS(words_13, 13, accept)
    WORDS(words_14, 14, accept)
    WORDS(words_15, 15, accept)
#endif

    state timestamps {
        packet.extract(hdr.timestamps);
        transition select(hdr.timestamps.prefix) {
            TIMESTAMPS_PREFIX: first_option;
            default: accept;
        }
    }

    state first_option {
        transition select(packet.lookahead<bit<32>>()) {
            TAG_PREFIX: tag;
            default: accept;
        }
    }

    state tag {
        packet.extract(hdr.tag);
        transition accept;
    }
}

#endif
