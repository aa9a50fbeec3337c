// SPDX-License-Identifier: Apache-2.0
// Table sizes and constants that both architectures share.

#ifndef CHECKMATE_SIZES
#define CHECKMATE_SIZES

// 256 boundaries x 16 shadow ids x 8 channels; no job uses all three maxima,
// so fewer streams are connected than could be replicated.
const int BOUNDARY_TABLE_SIZE    = 256;
const int REPLICATION_TABLE_SIZE = 32768;
const int STREAMS_TABLE_SIZE     = 8192;
const int FORWARDING_TABLE_SIZE  = 4096;
const int STUB_TABLE_SIZE        = 64;
const int MARKS_TABLE_SIZE       = 16;

typedef bit<9>  port_t;
typedef bit<16> group_t;
typedef bit<16> boundary_t;
typedef bit<16> replication_id_t;

// What becomes of a packet.
typedef bit<2> verdict_t;
const verdict_t FORWARD   = 0; // to `egress_port`, or to `group` where it isn't 0
const verdict_t REPLICATE = 1; // to `group`, as a tagged segment
const verdict_t PUNT      = 2; // to the controller
const verdict_t DROP      = 3;

// Group 0 means "no group" to every replication engine.
const group_t FLOOD_GROUP = 1;

const replication_id_t TRAINING_COPY = 0;

// Indices of the counter `passed`: segments with the tag's DSCP bit that were not replicated.
const bit<8> PASSED_WITHOUT_TAG   = 0;
const bit<8> PASSED_WITHOUT_ENTRY = 1;
// Indices of the counter `losses`: replicated segments whose shadow copy was lost.
const bit<8> LOST_NOT_CONNECTED   = 0;
const bit<8> LOST_OLD_INCARNATION = 1;
const int REASONS = 2;

#endif
