"""The numbers of `quire bench latency`; `tests/cli/test_bench.py` runs the command."""

import argparse

import pytest

from quire.tools.bench.arguments import add_latency_arguments
from quire.tools.bench.latency import make_params, results


def test_results_have_average_and_percentiles() -> None:
    found = results("m", [4.0, 1.0, 2.0, 3.0])
    assert (found["avg_latency"], found["percentiles"]["50"]) == (2.5, 2.5)
    assert found["latencies"] == [4.0, 1.0, 2.0, 3.0]


def test_options_become_sampling_parameters() -> None:
    parser = argparse.ArgumentParser()
    add_latency_arguments(parser)
    options = parser.parse_args([])
    assert (options.batch_size, options.input_len, options.output_len) == (8, 32, 128)
    params = make_params(options)
    assert (params.max_tokens, params.ignore_eos, params.detokenize) == (128, True, True)
    beams = make_params(
        parser.parse_args(["--use-beam-search", "--n", "3", "--disable-detokenize"])
    )
    assert beams.use_beam_search and beams.num_samples == 3 and not beams.detokenize
    with pytest.raises(SystemExit):
        parser.parse_args(["--n", "0"])
