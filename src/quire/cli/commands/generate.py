"""`quire generate [PROMPT]`: generate text for one prompt and stream it to the terminal."""

import argparse
import logging
import sys
from typing import Any

from quire.base.errors import RequestError
from quire.cli.model_files import check_input
from quire.cli.options.help_parser import Commands
from quire.cli.sampling import add_sampling, sampling_params
from quire.cli.settings import add_settings, given_settings
from quire.engine.wire.logs import print_error
from quire.ops.host.torch_import import declare_own_process
from quire.render.templates.template_pool import prestart

logger = logging.getLogger("quire")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        usage="quire generate [PROMPT] [option ...]",
        help="generate text for one prompt",
        description="Generate text for PROMPT, or for standard input, and stream it.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="prompt; by default standard input"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    add_sampling(parser)
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    declare_own_process()
    prompt = _prompt(arguments)
    check_input(arguments, is_chat=not arguments.raw)
    if not arguments.raw:
        prestart()
    from quire.serve.python.llm import LLM

    with LLM(**({"max_num_seqs": 1} | given_settings(arguments))) as llm:
        params = sampling_params(arguments, llm.get_default_sampling_params())
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
        print()
        final = output.outputs[0]
        if final.error is not None:
            print_error(final.error.message)
            return 1
        if final.finish_reason == "length":
            logger.info("[the answer was cut at its longest length]")
    return 0


def _prompt(arguments: argparse.Namespace) -> Any:
    """Return a text, or a conversation with one or two messages."""
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
