"""Training in a lab: killed ranks, verdicts, and the demo."""

from checkmate.base import extras

extras.check("a lab", "demo")
