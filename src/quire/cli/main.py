"""`quire COMMAND`: finds the command and turns the engine's errors into messages.

Exit status: 0 done, 1 the engine said no (its message is on standard error), 2 wrong usage,
130 interrupted.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from quire import __version__
from quire.base.errors import QuireError
from quire.cli import generate


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(message)s", stream=sys.stderr)
    try:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire",
        description="An LLM inference engine on paged KV memory.",
        epilog="`quire COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    generate.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
