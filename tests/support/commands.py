"""Running a command in this process."""

import pytest

from quire.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse
        status = int(stopped.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err
