"""Benchmarks of an engine in this process (throughput) and of a server (serve)."""
