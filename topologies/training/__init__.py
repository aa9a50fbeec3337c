"""Training in a lab: kills, verdicts, the demo."""
