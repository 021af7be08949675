"""`quire COMMAND`: finds the command and turns the engine's errors into messages.

Exit status: 0 done, 1 the engine said no (its message is on standard error), 2 wrong usage,
130 interrupted.
"""

import argparse
import difflib
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from quire.base.config import JSON_SETTINGS
from quire.base.errors import QuireError
from quire.base.version import QUIRE_VERSION
from quire.cli.config_file import describe, resolve
from quire.cli.json_flags import join_parts
from quire.cli.settings import add_vllm_settings, vllm_flags
from quire.serve.vllm_compat import VLLM_SETTINGS

logger = logging.getLogger("quire")

# Modules of this room, in the order of the help.
COMMANDS = (
    "serve", "chat", "generate", "batch", "bench", "simulate", "doctor", "fit", "verify", "port",
    "replay", "explain", "trace", "playback",
)  # fmt: skip
LONG_FLAG = re.compile(r"--[A-Za-z][\w.-]*(?==|$)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        notes = resolve(arguments)
        logging.basicConfig(
            level=arguments.log_level.upper(), format="%(message)s", stream=sys.stderr
        )
        for note in notes:
            logger.warning("%s", note)
        for line in describe(arguments.settings):
            logger.debug("%s", line)
        status: int = arguments.run(arguments)
        return status
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        sys.stderr.close()
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    words = list(with_dashes(argv))
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    command = _command(parser, words)
    if command.get_default("has_settings"):
        words = join_parts(words, [*JSON_SETTINGS, *VLLM_SETTINGS], vllm_flags())
        add_vllm_settings(command, words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        shown = " ".join(_without_values(unknown))
        command.error(f"unrecognized arguments: {shown}{_hint(unknown[0], command)}")
    return arguments


def _without_values(words: Sequence[str]) -> list[str]:
    """Return unknown words without the values of flags: a misspelt flag may hold a secret."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    flags = [word.partition("=")[0] for word in words[first:] if word.startswith("-")]
    return [*words[:first], *flags]


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser of all commands, or, which is sooner done, of the one that comes first."""
    parser = argparse.ArgumentParser(
        prog="quire",
        description="An LLM inference engine on paged KV memory.",
        epilog="`quire COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=f"quire {QUIRE_VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    is_named = bool(words) and words[0] in COMMANDS
    for name in words[:1] if is_named else COMMANDS:
        import_module(f"quire.cli.{name}").add_command(commands)
    return parser


def _command(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command, or of its kind, that these words name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for index, word in enumerate(words):
                if word in action.choices:
                    return _command(action.choices[word], words[index + 1 :])
    return parser


def with_dashes(argv: Iterable[str]) -> Iterable[str]:
    """Turn --max_model_len into --max-model-len."""
    is_text = False
    for argument in argv:
        is_text = is_text or argument == "--"
        flag = None if is_text else LONG_FLAG.match(argument)
        if flag is None:
            yield argument
        else:
            yield flag[0].replace("_", "-") + argument[flag.end() :]


def _hint(unknown: str, command: argparse.ArgumentParser) -> str:
    """Name the flag that comes closest to an unknown one, or say where models stand."""
    if any(action.dest == "given_models" for action in command._actions) and unknown[0] != "-":
        return " (give all models before the options)"
    flags = list(command._option_string_actions)
    flags += vllm_flags() if command.get_default("has_settings") else []
    close = difflib.get_close_matches(unknown.split("=")[0], flags, n=1)
    return f" (did you mean {close[0]}?)" if close and unknown.startswith("-") else ""


if __name__ == "__main__":
    sys.exit(main())
