"""What vLLM's own tests of its endpoints look at, as cases of ours.

A case is a test with one line of docstring, which is its row in docs/results/vllm-cases.md. Where
the answer here differs from vLLM's, the case holds to ours and says by `differs` why.
`python -m tests.serve.vllm_cases.table` writes the rows.
"""
