"""Exact conversion of training state to messages and bytes, and back: the public names of this package."""

from checkmate.state.plain import EXTRA_STATE, dumps, is_extra_state, loads, packed, unpacked
from checkmate.state.seeds import (
    PIECE_BYTES,
    Checksum,
    SeedReader,
    to_number,
    to_seeds,
)
from checkmate.state.tensors import (
    DTYPES,
    StateError,
    bytes_of,
    dtype_name,
    dump_generators,
    from_held,
    frozen_parameter,
    frozen_states,
    in_memory_order,
    is_frozen_state,
    load_generators,
    local_of,
    name_frozen,
    to_held,
)

__all__ = [
    "DTYPES",
    "EXTRA_STATE",
    "PIECE_BYTES",
    "Checksum",
    "SeedReader",
    "StateError",
    "bytes_of",
    "dtype_name",
    "dump_generators",
    "dumps",
    "from_held",
    "frozen_parameter",
    "frozen_states",
    "in_memory_order",
    "is_extra_state",
    "is_frozen_state",
    "load_generators",
    "loads",
    "local_of",
    "name_frozen",
    "packed",
    "to_held",
    "to_number",
    "to_seeds",
    "unpacked",
]
