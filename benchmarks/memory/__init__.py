"""The KV cache: blocks, prefixes, states, swapping, forks."""
