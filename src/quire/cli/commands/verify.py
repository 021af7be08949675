"""`quire verify MODEL`: compare a model with the same weights in the transformers package.

`quire verify MODEL --answer FILE` computes a recorded answer again instead. The exit status is 0 if
all is equal (a model: within rounding), 1 if something differs, and 2 if the comparison failed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from quire.base.errors import ConfigError, QuireError
from quire.base.settings.config import config_from_flat
from quire.cli.options.help_parser import Commands
from quire.cli.settings import add_some_settings, given_settings, human_integer
from quire.engine.wire.logs import print_error

SETTINGS = (
    "model", "tokenizer", "revision", "dtype", "model_impl", "load_format", "seed", "quantization",
    "quantization_group_size", "quantized_head", "block_size", "kv_cache_dtype", "device",
    "attention_backend", "hf_overrides",
)  # fmt: skip
EQUAL, DIFFERS, NOT_COMPARED = 0, 1, 2


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        usage="quire verify [MODEL] [option ...]",
        help="compare a model with the same weights in transformers",
        description="Compare MODEL (by default the demo model) with the same weights in the"
        " transformers package. Layers are compared one by one; then prompts at once, token by"
        " token, in chunks and in batches. Each attention backend and each format of weights and"
        " KV cache is run. The report says where a difference beyond rounding begins: attach it to"
        " a bug. Exit status 0 equal within rounding, 1 different, 2 not compared.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--prompt", metavar="TEXT", help="prompt of the comparison; by default a built-in text"
    )
    parser.add_argument(
        "--tokens", metavar="NUMBER", type=human_integer, default=16,
        help="number of tokens that transformers generates after the prompt (default: 16)",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="DIRECTORY",
        help="checkpoint that transformers reads instead of MODEL, such as the source of a"
        " conversion",
    )  # fmt: skip
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compare only the exact model and the engine as given; run this first",
    )
    parser.add_argument(
        "--answer", metavar="FILE", type=Path,
        help="JSON file with a request and the response to it: compute the response again, and"
        " report whether it is reproduced to the bit",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="file for the whole report")
    add_some_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    try:
        return _verify(arguments)
    except QuireError as error:
        print_error(error)
        return NOT_COMPARED


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.tokens < 0:
        raise ConfigError(f"--tokens must be at least 0, got {arguments.tokens}.")
    if arguments.answer is not None:
        return _verify_answer(arguments)
    from quire.serve.processes.progress import time_left
    from quire.tools.verify.report import WITHIN, Run, as_data, lines
    from quire.tools.verify.verify import Comparison, verify

    config = config_from_flat(**given_settings(arguments))
    comparison = Comparison(
        config, arguments.prompt, arguments.tokens, arguments.against, is_quick=arguments.quick
    )
    began, num_done = time.monotonic(), 0

    def show(run: Run, num_runs: int) -> None:
        nonlocal num_done
        num_done += 1
        left = time_left(num_done, num_runs, time.monotonic() - began)
        print(f"  {num_done}/{num_runs} {run.name}, {left}", file=sys.stderr)

    report = verify(comparison, show)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_data(report), indent=2) + "\n", "utf-8")
    for line in lines(report):
        print(line)
    return EQUAL if report.verdict == WITHIN else DIFFERS


def _verify_answer(arguments: argparse.Namespace) -> int:
    from quire.tools.verify.answers import read_answer, verify_answer

    answer = read_answer(arguments.answer)
    report = verify_answer(answer, config_from_flat(**given_settings(arguments)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_data(), indent=2) + "\n", "utf-8")
    for line in report.lines():
        print(line)
    return EQUAL if report.is_reproduced else DIFFERS
