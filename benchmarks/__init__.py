"""Measurement of the figures in docs/figures.md: `make bench`, or `python -m benchmarks NAME ...`."""
