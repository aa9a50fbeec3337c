// SPDX-License-Identifier: Apache-2.0
// Types, verdicts and table sizes that both architectures share.
// A table has two names: a local one for what it holds, and one with a dot, which the control plane and the packet
// tests use.

#ifndef CHECKMATE_TYPES
#define CHECKMATE_TYPES

typedef bit<9>  port_t;
typedef bit<16> group_t;
typedef bit<16> boundary_t;
typedef bit<16> replication_id_t;
typedef bit<8>  color_t; // of a meter

const color_t RED = METER_RED;

typedef bit<2> verdict_t;
const verdict_t FORWARD   = 0; // to `egress_port`, or to `group` if it is not 0
const verdict_t REPLICATE = 1; // to `group`, as a tagged segment
const verdict_t PUNT      = 2; // to the controller
const verdict_t DROP      = 3;

// Group 0 means "no group" to every replication engine.
const group_t FLOOD_GROUP = 1;

const replication_id_t TRAINING_COPY = 0;

const int PORTS = 512; // of `port_t`

const int BOUNDARY_TABLE_SIZE    = 256;
const int STREAMS_TABLE_SIZE     = 8192;
// An entry of `replication` has a stream for each holder, so there are at least as many streams.
const int REPLICATION_TABLE_SIZE = STREAMS_TABLE_SIZE;
const int FORWARDING_TABLE_SIZE  = 4096;
const int STUB_TABLE_SIZE        = 64;
const int CLIENTS_TABLE_SIZE     = 1024;
const int MARKS_TABLE_SIZE       = 16;
// Each port has a host's addresses, or those of the stubs behind a link.
const int SOURCES_TABLE_SIZE     = 4096;
// All hosts' addresses, and those of all stubs twice.
const int ADDRESSES_TABLE_SIZE   = 6144;

// Indices of the counter `passed`: segments with the tag's DSCP bit that were not replicated.
const bit<8> PASSED_WITHOUT_TAG   = 0;
const bit<8> PASSED_WITHOUT_ENTRY = 1;
// Indices of the counter `losses`: replicated segments whose shadow copy was lost.
const bit<8> LOST_NOT_CONNECTED   = 0;
const bit<8> LOST_OLD_INCARNATION = 1;
// Indices of the counter `limited`: packets for the controller that were over their meter's rate.
const bit<8> LIMITED_STRANGER = 0;
const bit<8> LIMITED_CLIENT   = 1;
const int REASONS = 2;

#endif
