"""Cases of vLLM's own tests of its endpoints, rewritten for quire.

A case is a test with one line of docstring, which is its row in docs/results/vllm-cases.md. If the
answer here differs from vLLM's, the case expects ours, and `differs` gives the reason. `python -m
tests.serve.vllm_cases.table` writes the rows.
"""
