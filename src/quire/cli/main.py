"""`quire COMMAND`: run a command, and print errors of the engine as messages.

Exit status: 0 done, 1 an error (its message is on standard error), 2 wrong usage, 130 interrupted.
"""

import argparse
import difflib
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from quire.base.errors import QuireError
from quire.base.settings.config import JSON_SETTINGS
from quire.base.version import QUIRE_VERSION
from quire.cli.config_file import describe, resolve
from quire.cli.options.help_parser import HelpParser
from quire.cli.options.json_flags import join_parts
from quire.cli.options.synonyms import COMMANDS as THEIR_COMMANDS
from quire.cli.options.synonyms import SYNONYMS
from quire.cli.options.translate import translate
from quire.cli.settings import add_vllm_settings, vllm_spellings
from quire.engine.wire.logs import begin_logging, print_error
from quire.serve.vllm_compat import VLLM_SETTINGS

logger = logging.getLogger("quire")

# In the order in which the help lists them.
COMMANDS = (
    "serve", "chat", "run", "launch", "pull", "list", "rm", "ps", "stop", "generate", "batch",
    "bench", "simulate", "doctor", "fit", "verify", "port", "replay", "explain", "trace",
    "playback",
)  # fmt: skip
# Modules of commands; the others are modules of their own name in quire.cli.commands.
MODULES = {
    "run": "quire.cli.local.run",
    "launch": "quire.cli.launch.command",
    **dict.fromkeys(("pull", "list", "rm"), "quire.cli.local.models"),
    **dict.fromkeys(("ps", "stop"), "quire.cli.local.servers"),
}
NEAR = 0.8  # similarity above which quire's own flags are suggested first
LONG_FLAG = re.compile(r"--[A-Za-z][\w.-]*(?==|$)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        notes = [*arguments.notes, *resolve(arguments)]
        begin_logging(arguments.log_level)
        for note in notes:
            logger.warning("%s", note)
        for line in describe(arguments.settings):
            logger.debug("%s", line)
        status: int = arguments.run(arguments)
        return status
    except QuireError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed the pipe
        sys.stderr.close()
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    words, rest = list(with_dashes(argv)), []
    if words[:1] == ["launch"] and "--" in words:  # arguments of another program follow
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    command = _command(parser, words)
    _check_command(parser, words[0])
    has_settings = command.get_default("has_settings")
    theirs = vllm_spellings() if has_settings else []
    words, notes = translate(words, {*command._option_string_actions, *theirs}, command.prog)
    if has_settings:
        words = join_parts(words, [*JSON_SETTINGS, *VLLM_SETTINGS], theirs)
        add_vllm_settings(command, words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        shown = " ".join(_without_values(unknown))
        command.error(f"there is no option {shown}{_hint(unknown[0], command, theirs)}")
    arguments.notes, arguments.rest = notes, rest
    return arguments


def _check_command(parser: HelpParser, word: str) -> None:
    """Exit with a usage error and a hint if a word is not a command."""
    if word.startswith("-") or word in parser.commands():
        return
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"commands are: {', '.join(COMMANDS)}"
    parser.error(f"there is no command {word!r}; {THEIR_COMMANDS.get(word, hint)}")


def _without_values(words: Sequence[str]) -> list[str]:
    """Return unknown words without the values of flags, since a misspelt flag may hold a secret."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    flags = [word.partition("=")[0] for word in words[first:] if word.startswith("-")]
    return [*words[:first], *flags]


def _parser(words: Sequence[str]) -> HelpParser:
    """Return the parser of the first word's command, or of all commands, which is slower."""
    parser = HelpParser(
        prog="quire",
        usage="quire COMMAND [option ...]",
        description="An LLM inference engine and server.",
        epilog="`quire COMMAND --help` explains a command.",
    )
    parser.add_argument("-v", "--version", action="version", version=f"quire {QUIRE_VERSION}")
    commands = parser.add_subparsers(
        required=True, prog="quire", metavar="COMMAND", title="commands"
    )
    is_named = bool(words) and words[0] in COMMANDS
    shown = words[:1] if is_named else COMMANDS
    for module in dict.fromkeys(MODULES.get(n, f"quire.cli.commands.{n}") for n in shown):
        import_module(module).add_command(commands)
    return parser


def _command(parser: HelpParser, words: Sequence[str]) -> HelpParser:
    """Return the parser of the command, or subcommand, in these words."""
    commands = parser.commands()
    for index, word in enumerate(words):
        if word in commands:
            return _command(commands[word], words[index + 1 :])
    return parser


def with_dashes(argv: Iterable[str]) -> Iterable[str]:
    """Replace underscores in flags by hyphens: --max_model_len becomes --max-model-len."""
    is_text = False
    for argument in argv:
        is_text = is_text or argument == "--"
        flag = None if is_text else LONG_FLAG.match(argument)
        if flag is None:
            yield argument
        else:
            yield flag[0].replace("_", "-") + argument[flag.end() :]


def _hint(unknown: str, command: HelpParser, theirs: Sequence[str]) -> str:
    """Return a hint: the most similar flag, or the rule for the place of models."""
    if any(action.dest == "given_models" for action in command._actions) and unknown[0] != "-":
        return " (give all models before the options)"
    if not unknown.startswith("-"):
        return ""
    flag, own = unknown.partition("=")[0], [*command._option_string_actions]
    close = difflib.get_close_matches(flag, own, n=1, cutoff=NEAR)
    if close := close or difflib.get_close_matches(flag, [*own, *theirs, *SYNONYMS], n=1):
        return f" (did you mean {close[0]}?)"
    return f"; `{command.prog} --help all` lists the options"


if __name__ == "__main__":
    sys.exit(main())
