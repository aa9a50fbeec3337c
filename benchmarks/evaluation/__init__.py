"""Checkmate beside other ways to survive failures: `python -m benchmarks.evaluation --help`."""
