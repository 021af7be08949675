"""Tools: benchmarks, their workloads and limits."""
