"""`quire batch` as its user starts it: killed, stopped, started again (`serve/batch_run.py`)."""

import gc
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.support.commands import run
from tests.support.serve.batch_files import read, request, write
from tests.support.serve.direct_engine import text_of

WAIT_S = 120.0
SYSTEMS = ["You are a fox. Answer in rhymes. " * 4, "Count slowly, and say why. " * 4]
# No bar, and few rows, so that a batch takes long enough to be killed in its middle.
SMALL = ("--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M")


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """A batch in this process unfreezes what tests/conftest.py has frozen: collections would look
    through all tests from then on."""
    yield
    gc.collect()
    gc.freeze()


class Batch:
    """A running `quire batch`."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out"
        command = [sys.executable, "-m", "quire.cli.main", "batch", str(folder / "in")]
        self.process = subprocess.Popen(
            [*command, str(self.output), *SMALL], stderr=subprocess.PIPE, text=True
        )

    def wait_for_lines(self, number: int) -> None:
        """Wait until so many lines are done, or the process has ended."""
        end_s = time.monotonic() + WAIT_S
        while self.num_lines < number and self.process.poll() is None:
            assert time.monotonic() < end_s, f"{self.num_lines} lines after {WAIT_S} s"
            time.sleep(0.005)

    @property
    def num_lines(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def end(self, number: int) -> tuple[int, str]:
        """Signal, wait; exit status and what was said."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said


def conversation(number: int) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": SYSTEMS[number % 2]},
        {"role": "user", "content": f"What is {number} + 2?"},
    ]
    line = request(f"r{number}", url="/v1/chat/completions")
    line["body"] |= {"messages": messages, "max_tokens": 24}
    del line["body"]["prompt"]
    return line


def check_all_done(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Each line has one answer, and some are compared with the engine's own."""
    found = read(folder / "out")
    assert sorted(line["custom_id"] for line in found) == sorted(r["custom_id"] for r in lines)
    by_id = {line["custom_id"]: line["response"] for line in found}
    assert all(response["status_code"] == 200 for response in by_id.values())
    for line in lines[:: len(lines) // 5]:
        choice = by_id[line["custom_id"]]["body"]["choices"][0]
        assert choice["message"]["content"] == text_of(line["body"]["messages"], max_tokens=24)


def stop_and_go_on(
    folder: Path,
    num_lines: int,
    signals: list[signal.Signals],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Stop a batch with each of these in turn, each time further on. Then let it end, which needs
    no process of its own."""
    lines = [conversation(number) for number in range(num_lines)]
    write(folder / "in", lines)
    kept, end = b"", b"\n"
    for number, sent in enumerate(signals, 1):
        batch = Batch(folder)
        batch.wait_for_lines(number * num_lines // (len(signals) + 2))
        status, said = batch.end(sent)
        whole = (folder / "out").read_bytes()
        assert whole.startswith(kept) and len(whole) > len(kept)
        kept = whole[: whole.rindex(end) + 1]
        left = num_lines - kept.count(end)
        assert left > 0
        if sent is signal.SIGKILL:
            assert status == -sent
            (folder / "out").write_bytes(whole + b'{"id":"batch_req_12'[: number * 7])  # torn
        else:
            assert (status, whole) == (130, kept) and "Traceback" not in said
            assert f"{left} of {num_lines} lines are left" in said
            assert "Run the same command again" in said
    caplog.set_level(logging.INFO, "quire")
    assert main(["batch", str(folder / "in"), str(folder / "out"), *SMALL]) == 0
    assert f"{kept.count(end)} of {num_lines} lines are done already" in caplog.text
    assert (folder / "out").read_bytes().startswith(kept)
    check_all_done(folder, lines)


@pytest.mark.slow
def test_a_batch_that_is_killed_or_stopped_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop_and_go_on(tmp_path, 40, [signal.SIGKILL, signal.SIGINT], caplog)


@pytest.mark.slow
def test_a_long_batch_that_is_killed_five_times_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop_and_go_on(tmp_path, 1000, [signal.SIGKILL] * 5, caplog)


def test_what_cannot_be_run_is_said_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(write(tmp_path / "in", [request("a")])), str(tmp_path / "out")
    for arguments, told in (
        (("batch",), "IN must be given once"),
        (("batch", path), "OUT must be given once"),
        (("batch", path, out, "-o", out), "OUT must be given once"),
        (("batch", str(tmp_path / "none"), out), "there is no file"),
        (("batch", path, path), "is also the input"),
        (("run-batch", "-i", path, "-o", path), "is also the input"),
        (("batch", path, str(tmp_path / "no" / "out")), "cannot be written"),
        (("batch", path, out, "-m", str(tmp_path / "model")), "model"),
    ):
        status, _, said = run(capsys, *arguments)
        assert status == 1 and told in said, said
        assert Path(path).read_text() == json.dumps(request("a")) + "\n"


def test_a_file_without_lines_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in", [])
    assert run(capsys, "batch", str(path), str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out").read_bytes() == b""
