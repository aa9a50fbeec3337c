"""State of training as messages and bytes, and back, bit for bit: all that others need of this folder."""

from checkmate.state.generators import dump_generators, load_generators
from checkmate.state.plain import dumps, loads
from checkmate.state.seeds import PIECE_BYTES, Checksum, SeedReader, from_seeds, to_pieces, to_seeds
from checkmate.state.tensors import DTYPES, StateError, bytes_of, dtype_name

__all__ = [
    "DTYPES",
    "PIECE_BYTES",
    "Checksum",
    "SeedReader",
    "StateError",
    "bytes_of",
    "dtype_name",
    "dump_generators",
    "dumps",
    "from_seeds",
    "load_generators",
    "loads",
    "to_pieces",
    "to_seeds",
]
