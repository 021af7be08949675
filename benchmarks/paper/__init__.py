"""The papers' evaluation, from the code that serves: `python -m benchmarks.paper`, `make paper`."""
