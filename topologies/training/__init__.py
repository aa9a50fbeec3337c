"""Training in a lab: killed ranks, verdicts, and the demo."""
