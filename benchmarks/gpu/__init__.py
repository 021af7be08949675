"""Benchmarks on a GPU: `python -m benchmarks.gpu --part bench` and `--part peers`."""
