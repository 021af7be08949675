"""Options of the benchmarks, with vLLM's names. Imports nothing heavy, to keep the help fast."""

import argparse
import math
from pathlib import Path

MAX_SCALE = 1000
DATASETS = (
    "random",
    "sharegpt",
    "prefix_repetition",
    "sharegpt-like",
    "alpaca-like",
    "custom",
)
AGENT_SHAPES = ("agentx", "codex")
BACKENDS = ("openai", "openai-chat", "vllm")
MANY_PROMPTS = 1000
METRICS = ("ttft", "tpot", "itl", "e2el")
# Option -> type, what it does. Sent only if given.
SAMPLERS: dict[str, tuple[type, str]] = {
    "temperature": (float, "randomness of sampling; 0 is greedy"),
    "top_p": (float, "sample from the most probable tokens up to this total probability"),
    "top_k": (int, "sample from this many most probable tokens"),
    "min_p": (float, "minimum probability of a token, relative to the most probable one"),
    "frequency_penalty": (float, "penalty per occurrence of a generated token"),
    "presence_penalty": (float, "penalty for every token generated before"),
    "repetition_penalty": (float, "divisor of the logits of tokens seen before"),
}


def add_dataset_arguments(
    parser: argparse.ArgumentParser, num_prompts: int | None, input_len: int, output_len: int
) -> None:
    """Add the options of the requests. The numbers are the benchmark's defaults."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name", choices=DATASETS, default="random",
        help="source of prompts; sharegpt and custom need --dataset-path, the -like ones have the"
        " lengths of the PagedAttention paper (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE",
        help='dataset file: JSON of conversations, or for custom one `{"prompt": ...}` per line',
    )  # fmt: skip
    every = "" if num_prompts else f" (default: all of a trace, or {MANY_PROMPTS:,} drawn ones)"
    add_count(group, ("--num-prompts",), num_prompts, f"number of requests{every}")
    add_count(
        group, ("--random-input-len", "--input-len"), input_len, "prompt tokens of a random request"
    )
    add_count(
        group, ("--random-output-len", "--output-len"), None,
        f"output tokens of a request; by default {output_len} for random, else as the dataset says",
    )  # fmt: skip
    group.set_defaults(default_output_len=output_len)
    group.add_argument(
        "--random-range-ratio", type=_ratio, default=0.0, metavar="SHARE",
        help="share by which random lengths vary (default: %(default)s)",
    )  # fmt: skip
    add_count(
        group, ("--random-prefix-len", "--prefix-len"), 0,
        "tokens of a prefix that all random prompts share", minimum=0,
    )  # fmt: skip
    add_count(
        group, ("--sharegpt-output-len",), None,
        "output tokens of a sharegpt request (default: the length in the file)",
    )  # fmt: skip
    add_count(group, ("--custom-output-len",), 256, "output tokens of a custom request")
    for name, value, text in (
        ("prefix-len", 256, "tokens of each prefix"),
        ("suffix-len", 256, "tokens of each prompt after the prefix"),
        ("num-prefixes", 10, "number of prefixes"),
        ("output-len", 128, "output tokens of a request"),
    ):
        add_count(
            group, (f"--prefix-repetition-{name}",), value, f"prefix_repetition: {text}"
        )  # fmt: skip


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench throughput`, without the engine's settings, which include --model
    and --seed."""
    add_dataset_arguments(parser, num_prompts=16, input_len=128, output_len=64)
    group = parser.add_argument_group("measurement")
    add_count(group, ("--num-warmups",), 1, "short runs before the measurement", minimum=0)
    add_count(group, ("--rounds",), 1, "number of runs; the median is shown")
    _add_output(group)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench latency`, without the settings of the engine."""
    group = parser.add_argument_group("measurement")
    add_count(group, ("--input-len",), 32, "tokens of each prompt")
    add_count(group, ("--output-len",), 128, "output tokens of each prompt")
    add_count(group, ("--batch-size",), 8, "prompts that run at the same time")
    add_count(group, ("--n",), 1, "continuations of each prompt")
    add_count(group, ("--num-iters-warmup",), 10, "batches before the measurement", minimum=0)
    add_count(group, ("--num-iters",), 30, "measured batches")
    group.add_argument(
        "--use-beam-search", action="store_true", help="search for the best --n continuations"
    )
    group.add_argument(
        "--disable-detokenize", action="store_true", help="compute token ids only, without text"
    )
    _add_output(group)


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench calibrate`, without the settings of the engine."""
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        help="duration of the measurement (default: %(default)g)",
    )
    _add_output(group)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench serve`."""
    _add_server(parser)
    add_dataset_arguments(parser, num_prompts=1000, input_len=1024, output_len=128)
    _add_load(parser)
    _add_sampling(parser)
    group = add_result_arguments(parser)
    group.add_argument(
        "--save-result", action="store_true", help="write the results to a file named by date"
    )
    group.add_argument(
        "--result-dir", type=Path, metavar="DIR", help="folder for --save-result (default: .)"
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="also write each request's times and generated text to the result file",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def add_agents_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench agents`."""
    _add_server(parser)
    group = parser.add_argument_group("sessions")
    group.add_argument(
        "--shape", choices=AGENT_SHAPES, default="agentx",
        help="published shape of the sessions (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="sessions to replay instead: aiperf's multi-turn JSONL, or Mooncake's with session_id",
    )  # fmt: skip
    add_count(group, ("--trace-piece",), 512, "tokens per hash id of a Mooncake trace")
    add_count(
        group, ("--output-len",), 128, "output tokens of a turn without output_length in a trace"
    )  # fmt: skip
    add_count(
        group, ("--num-sessions",), None, "sessions without their subagents (default: 20, or all"
        " of a trace)",
    )  # fmt: skip
    group.add_argument(
        "--scale", type=token_scale, default=1.0, metavar="FACTOR",
        help="factor of all token counts of a shape, such as 0.005 for a context of 2,048"
        " (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--arrival-s", type=at_least_zero, default=1.0, metavar="SECONDS",
        help="mean time between the starts of two sessions (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--speed", type=positive, default=1.0, metavar="FACTOR",
        help="divisor of all pauses and starts; inf for none (default: %(default)g)",
    )  # fmt: skip
    add_count(
        group, ("--num-alone",), 2, "sessions to run without others before, for comparison",
        minimum=0,
    )  # fmt: skip
    add_count(group, ("--seed",), 0, "seed", minimum=0)
    _add_sampling(parser)
    group = parser.add_argument_group("results")
    _add_output(group)
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def add_result_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of the results and return the group."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl", metavar="LIST",
        help=f"metrics to print, of {','.join(METRICS)} (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", default="99", metavar="LIST",
        help="percentiles to print, such as 50,90,99.9 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="latency limits of a good request, such as `ttft:500 tpot:50 e2el:10000`",
    )  # fmt: skip
    _add_output(group)
    return group


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", choices=BACKENDS, default="openai",
        help="API to use: openai and vllm are /v1/completions, openai-chat is"
        " /v1/chat/completions (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--endpoint", metavar="PATH",
        help="path of the API, such as /openai/v1/completions (default: the back end's)",
    )  # fmt: skip
    group.add_argument(
        "--base-url", metavar="URL", help="address of the server, instead of --host and --port"
    )
    group.add_argument("--host", default="127.0.0.1", help="host (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="TCP port (default: %(default)s)")
    group.add_argument(
        "--model", help="model name in requests (default: the first that the server lists)"
    )
    group.add_argument(
        "--tokenizer", metavar="MODEL",
        help="tokenizer: directory or id; by default the server's /tokenize, with token ids below"
        " 1,000 in random prompts",
    )  # fmt: skip
    group.add_argument(
        "--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
        help="headers of every request; OPENAI_API_KEY of the environment is also sent",
    )  # fmt: skip
    group.add_argument(
        "--insecure", action="store_true", help="do not verify the certificate of the server"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS",
        help="how long to wait for the server to answer (default: %(default)g)",
    )  # fmt: skip


def add_rate_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of the arrivals and return the group."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=positive, default=math.inf, metavar="PER_SECOND",
        help="requests per second; inf sends all at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="SHAPE",
        help="shape of arrivals: 1 is a Poisson process, lower values are burstier"
        " (default: %(default)s)",
    )  # fmt: skip
    return group


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = add_rate_arguments(parser)
    add_count(group, ("--max-concurrency",), None, "maximum number of open requests")
    add_count(group, ("--num-warmups",), 0, "requests before the measurement", minimum=0)
    group.add_argument(
        "--seed", type=int, default=0,
        help="seed of prompts, lengths and arrivals; a run with the same seed hits the prefix cache"
        " (default: %(default)s)",
    )  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the server's)")
    for name, (kind, text) in SAMPLERS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument("--ignore-eos", action="store_true", help="continue after end of sequence")
    group.add_argument(
        "--logprobs", type=int, metavar="INT", help="number of log-probabilities per token"
    )
    group.add_argument("--extra-body", metavar="JSON", help="JSON object merged into every request")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-json", type=Path, metavar="FILE", help="file for the results")


def add_count(
    group: argparse._ArgumentGroup,
    flags: tuple[str, ...],
    default: int | None,
    text: str,
    minimum: int = 1,
) -> None:
    """Add an option for a whole number of at least `minimum`."""

    def count(given: str) -> int:
        value = int(given)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{given} is below {minimum}")
        return value

    count.__name__ = "int"  # argparse names the type in its error
    shown = "" if default is None else " (default: %(default)s)"
    group.add_argument(*flags, type=count, default=default, metavar="INT", help=text + shown)


def positive(given: str) -> float:
    value = float(given)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{given} is not above 0")
    return value


def token_scale(given: str) -> float:
    value = float(given)
    if not 0 < value <= MAX_SCALE:
        raise argparse.ArgumentTypeError(f"{given} is not a number above 0, at most {MAX_SCALE}")
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
