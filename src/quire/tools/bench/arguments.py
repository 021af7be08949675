"""Options of the benchmarks, with vLLM's names. Imports nothing heavy: help must be quick."""

import argparse
import math
from pathlib import Path

DATASETS = (
    "random",
    "sharegpt",
    "prefix_repetition",
    "sharegpt-like",
    "alpaca-like",
    "custom",
)
BACKENDS = ("openai", "openai-chat", "vllm")
MANY_PROMPTS = 1000
METRICS = ("ttft", "tpot", "itl", "e2el")
# Option -> type, what it does. Sent only if given.
SAMPLERS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy; higher is more random"),
    "top_p": (float, "keep the most probable tokens that make up this much probability"),
    "top_k": (int, "keep this many most probable tokens"),
    "min_p": (float, "keep tokens at least this probable, relative to the most probable one"),
    "frequency_penalty": (float, "subtracted per time that a token was generated"),
    "presence_penalty": (float, "subtracted from tokens that were generated already"),
    "repetition_penalty": (float, "divides the logits of tokens seen before"),
}


def add_dataset_arguments(
    parser: argparse.ArgumentParser, num_prompts: int | None, input_len: int, output_len: int
) -> None:
    """Add what is asked. The numbers are the defaults of a benchmark."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name", choices=DATASETS, default="random",
        help="sharegpt and custom need --dataset-path; the -like ones draw lengths as the"
        " PagedAttention paper gives them (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE",
        help='sharegpt: JSON of conversations; custom: one {"prompt": ...} per line',
    )  # fmt: skip
    every = "" if num_prompts else f" (default: all of a trace, or {MANY_PROMPTS:,} drawn ones)"
    add_count(group, ("--num-prompts",), num_prompts, f"requests{every}")
    add_count(group, ("--random-input-len", "--input-len"), input_len, "random: own prompt tokens")
    add_count(
        group, ("--random-output-len", "--output-len"), None,
        f"random: output tokens (default: {output_len}); sharegpt, prefix_repetition and custom:"
        " instead of theirs",
    )  # fmt: skip
    group.set_defaults(default_output_len=output_len)
    group.add_argument(
        "--random-range-ratio", type=_ratio, default=0.0, metavar="SHARE",
        help="random: lengths vary by up to this share, evenly (default: %(default)s)",
    )  # fmt: skip
    add_count(
        group, ("--random-prefix-len", "--prefix-len"), 0,
        "random: tokens before all prompts that they share", least=0,
    )  # fmt: skip
    add_count(
        group, ("--sharegpt-output-len",), None,
        "sharegpt: output tokens (default: as long as the answer in the file)",
    )  # fmt: skip
    add_count(group, ("--custom-output-len",), 256, "custom: output tokens")
    for name, value, text in (
        ("prefix-len", 256, "tokens of each prefix"),
        ("suffix-len", 256, "own tokens after the prefix"),
        ("num-prefixes", 10, "different prefixes"),
        ("output-len", 128, "output tokens"),
    ):
        add_count(
            group, (f"--prefix-repetition-{name}",), value, f"prefix_repetition: {text}"
        )  # fmt: skip


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench throughput`, without the settings of the engine (which bring
    --model and --seed)."""
    add_dataset_arguments(parser, num_prompts=16, input_len=128, output_len=64)
    group = parser.add_argument_group("measurement")
    add_count(group, ("--num-warmups",), 1, "short runs that do not count", least=0)
    add_count(group, ("--rounds",), 1, "runs; the median one is shown")
    _add_output(group)


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench calibrate`, without the settings of the engine."""
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--seconds", type=positive, default=60.0, help="how long to measure (default: %(default)s)"
    )
    _add_output(group)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench serve`."""
    _add_server(parser)
    add_dataset_arguments(parser, num_prompts=1000, input_len=1024, output_len=128)
    _add_load(parser)
    _add_sampling(parser)
    group = add_result_arguments(parser)
    group.add_argument("--save-result", action="store_true", help="write results under their date")
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="where (default: here)")
    group.add_argument(
        "--save-detailed", action="store_true", help="write every request's times and text too"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def add_result_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add which results are wanted; returns the group."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl", metavar="LIST",
        help=f"which to print, of {','.join(METRICS)} (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", default="99", metavar="LIST",
        help="such as 50,90,99.9 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="count requests that meet all limits, such as ttft:500 tpot:50 e2el:10000",
    )  # fmt: skip
    _add_output(group)
    return group


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", choices=BACKENDS, default="openai",
        help="openai (and vllm): /v1/completions; openai-chat: /v1/chat/completions"
        " (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    group.add_argument("--model", help="(default: the first one that the server lists)")
    group.add_argument(
        "--tokenizer", metavar="MODEL",
        help="directory or id; without it texts are tokenised by the server's /tokenize, and the"
        " ids of random prompts are below 1,000, which nearly every model has",
    )  # fmt: skip
    group.add_argument(
        "--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
        help="sent with every request; the environment's OPENAI_API_KEY is sent too",
    )  # fmt: skip
    group.add_argument("--insecure", action="store_true", help="do not check the certificate")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS",
        help="wait this long for the server to answer (default: %(default)s)",
    )  # fmt: skip


def add_rate_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add when requests come; returns the group."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=positive, default=math.inf, metavar="PER_SECOND",
        help="requests sent per second; inf sends all at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="SHAPE",
        help="1 is a Poisson process, less is burstier, more is evener (default: %(default)s)",
    )  # fmt: skip
    return group


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = add_rate_arguments(parser)
    add_count(group, ("--max-concurrency",), None, "most requests that are open at once")
    add_count(group, ("--num-warmups",), 0, "requests before the measurement", least=0)
    group.add_argument(
        "--seed", type=int, default=0,
        help="of prompts, lengths and arrivals; a second run with the same seed meets the server's"
        " prefix cache (default: %(default)s)",
    )  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the server's)")
    for name, (kind, text) in SAMPLERS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument("--ignore-eos", action="store_true", help="go on after end of sequence")
    group.add_argument("--logprobs", type=int, metavar="INT", help="log-probabilities per token")
    group.add_argument("--extra-body", metavar="JSON", help="an object merged into every request")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there")


def add_count(
    group: argparse._ArgumentGroup,
    flags: tuple[str, ...],
    default: int | None,
    text: str,
    least: int = 1,
) -> None:
    """Add an option for a whole number of at least `least`."""

    def count(given: str) -> int:
        value = int(given)
        if value < least:
            raise argparse.ArgumentTypeError(f"{given} is below {least}")
        return value

    count.__name__ = "int"  # argparse names the type in its error
    shown = "" if default is None else " (default: %(default)s)"
    group.add_argument(*flags, type=count, default=default, metavar="INT", help=text + shown)


def positive(given: str) -> float:
    value = float(given)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{given} is not above 0")
    return value


def at_least_zero(given: str) -> float:
    value = float(given)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{given} is not a number from 0")
    return value


def _ratio(given: str) -> float:
    value = float(given)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{given} is not in [0, 1)")
    return value
