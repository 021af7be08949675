"""`quire generate [PROMPT]`: one answer, streamed to the terminal."""

import argparse
import logging
import sys
from typing import Any

from quire.base.errors import RequestError
from quire.base.sampling_params import SamplingParams
from quire.cli.settings import add_settings, given_settings

logger = logging.getLogger("quire")

# Option -> field of SamplingParams, type, what it does.
SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy; higher is more random"),
    "top_p": (float, "keep the most probable tokens that make up this much probability"),
    "top_k": (int, "keep this many most probable tokens"),
    "min_p": (float, "keep tokens at least this probable, relative to the most probable one"),
    "presence_penalty": (float, "subtracted from tokens that were generated already"),
    "frequency_penalty": (float, "subtracted per time that a token was generated"),
    "repetition_penalty": (float, "divides the logits of tokens seen before"),
    "max_tokens": (int, "most tokens to generate; the rest of the context if absent"),
    "min_tokens": (int, "no end before this many tokens"),
}


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer PROMPT (or standard input) and stream the answer.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input if absent")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"),
        help="what is told on standard error (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("sampling (defaults: the model's)")
    for name, (kind, text) in SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text")
    group.add_argument("--ignore-eos", action="store_true", help="go on after end of sequence")
    group.add_argument(
        "--sampling-seed", type=int, metavar="INT", help="the same seed gives the same answer"
    )
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    from quire.serve.llm import LLM

    prompt = _prompt(arguments)
    settings = given_settings(arguments)
    settings["max_num_seqs"] = settings["max_num_seqs"] or 1
    with LLM(**settings) as llm:
        params = _sampling(arguments, llm.get_default_sampling_params())
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
        print()
        final = output.outputs[0]
        if final.finish_reason == "error":
            print(f"quire: {final.stop_reason}", file=sys.stderr)
            return 1
        if final.finish_reason == "length":
            logger.info("[the answer was cut at its longest length]")
    return 0


def _prompt(arguments: argparse.Namespace) -> Any:
    """A text, or a conversation of one or two messages."""
    text = arguments.prompt
    if text is None:
        if sys.stdin.isatty():
            raise RequestError('there is no prompt; give one: quire generate "Hello".')
        text = sys.stdin.read()
    if not text.strip():
        raise RequestError("the prompt is empty.")
    if arguments.raw:
        if arguments.system:
            raise RequestError("--system needs a chat template, which --raw switches off.")
        return text
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [*system, {"role": "user", "content": text}]


def _sampling(arguments: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The model's defaults, with what was set on the command line in their place."""
    fields = {name: getattr(defaults, name) for name in SAMPLING}
    fields["max_tokens"] = None
    fields |= {n: getattr(arguments, n) for n in SAMPLING if getattr(arguments, n) is not None}
    return SamplingParams(
        **fields,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        seed=arguments.sampling_seed,
    )
