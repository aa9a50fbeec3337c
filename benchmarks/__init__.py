"""The README's figures, measured: `make bench`, or `python -m benchmarks NAME ...` for some."""
