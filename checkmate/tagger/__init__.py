"""The tagger: tags chunks of a kernel TCP connection, segment by segment (design, sections 2 and 5)."""

from checkmate.tagger.errors import TaggerError, TaggerUnavailable
from checkmate.tagger.program import Tagger
from checkmate.tagger.sockets import TaggedSocket

__all__ = ["TaggedSocket", "Tagger", "TaggerError", "TaggerUnavailable"]
