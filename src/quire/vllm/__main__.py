"""`python -m quire.vllm SCRIPT [argument ...]`: runs a script whose `import vllm` finds quire.

`-m MODULE` runs a module. Errors of quire are shown without a traceback.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from quire.base.errors import QuireError
from quire.vllm.finder import install
from quire.vllm.names import VLLM

USAGE = "usage: python -m quire.vllm SCRIPT [argument ...]   (or -m MODULE)"


def main(words: Sequence[str]) -> int:
    """Run a script with its arguments; return the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nRun a script whose imports of vllm find quire's names.")
        return 0 if words else 2
    is_module = words[0] == "-m"
    rest = list(words[1:] if is_module else words)
    if not rest or not (is_module or os.path.isfile(rest[0])):
        message = f"there is no script {rest[0]}." if rest else "-m needs the name of a module."
        print(f"quire: {message}\n{USAGE}", file=sys.stderr)
        return 2
    install()
    try:
        _run(is_module, rest)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        if error.name != VLLM:
            raise
        print(f"quire: {error}", file=sys.stderr)
        return 1
    return 0


def _run(is_module: bool, words: list[str]) -> None:
    """Run a module or a script as Python does: with its arguments, and its folder first in the
    path."""
    sys.argv = words
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
