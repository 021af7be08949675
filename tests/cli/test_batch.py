"""`quire batch` as a user runs it: killed, stopped, started again (`serve/batch_run.py`)."""

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
# Few rows, so that a batch takes long enough to be killed midway.
SMALL = ("--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M")


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """Freeze objects again, since a batch in this process unfreezes the ones of tests/conftest.py.
    Otherwise later collections would visit the objects of all tests."""
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
        """Wait until this number of lines is done, or the process has ended."""
        end_s = time.monotonic() + WAIT_S
        while self.num_lines < number and self.process.poll() is None:
            assert time.monotonic() < end_s, f"{self.num_lines} lines after {WAIT_S} s"
            time.sleep(0.005)

    @property
    def num_lines(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal, wait for the end, and return the exit status and standard error."""
        self.process.send_signal(number)
        _, shown = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, shown


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
    """Assert that each line has one answer, and compare some with the engine's own."""
    found = read(folder / "out")
    assert sorted(line["custom_id"] for line in found) == sorted(r["custom_id"] for r in lines)
    by_id = {line["custom_id"]: line["response"] for line in found}
    assert all(response["status_code"] == 200 for response in by_id.values())
    for line in lines[:: len(lines) // 5]:
        choice = by_id[line["custom_id"]]["body"]["choices"][0]
        assert choice["message"]["content"] == text_of(line["body"]["messages"], max_tokens=24)


def stop_and_resume(
    folder: Path,
    num_lines: int,
    signals: list[signal.Signals],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Stop a batch with each signal in turn, each time later. Then let it end in this process."""
    lines = [conversation(number) for number in range(num_lines)]
    write(folder / "in", lines)
    whole_lines, end = b"", b"\n"
    for number, sent in enumerate(signals, 1):
        batch = Batch(folder)
        batch.wait_for_lines(number * num_lines // (len(signals) + 2))
        status, shown = batch.end(sent)
        whole = (folder / "out").read_bytes()
        assert whole.startswith(whole_lines) and len(whole) > len(whole_lines)
        whole_lines = whole[: whole.rindex(end) + 1]
        num_left = num_lines - whole_lines.count(end)
        assert num_left > 0
        if sent is signal.SIGKILL:
            assert status == -sent
            (folder / "out").write_bytes(whole + b'{"id":"batch_req_12'[: number * 7])  # torn
        else:
            assert (status, whole) == (130, whole_lines) and "Traceback" not in shown
            assert f"{num_left} of {num_lines} lines are left" in shown
            assert "Run the same command again" in shown
    caplog.set_level(logging.INFO, "quire")
    assert main(["batch", str(folder / "in"), str(folder / "out"), *SMALL]) == 0
    assert f"{whole_lines.count(end)} of {num_lines} lines are done already" in caplog.text
    assert (folder / "out").read_bytes().startswith(whole_lines)
    check_all_done(folder, lines)


@pytest.mark.slow
def test_killed_or_stopped_batch_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop_and_resume(tmp_path, 40, [signal.SIGKILL, signal.SIGINT], caplog)


@pytest.mark.slow
def test_long_batch_resumes_after_five_kills(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop_and_resume(tmp_path, 1000, [signal.SIGKILL] * 5, caplog)


def test_invalid_batches_are_refused_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(write(tmp_path / "in", [request("a")])), str(tmp_path / "out")
    for arguments, message in (
        (("batch",), "IN must be given once"),
        (("batch", path), "OUT must be given once"),
        (("batch", path, out, "-o", out), "OUT must be given once"),
        (("batch", str(tmp_path / "none"), out), "there is no file"),
        (("batch", path, path), "is also the input"),
        (("run-batch", "-i", path, "-o", path), "is also the input"),
        (("batch", path, str(tmp_path / "no" / "out")), "cannot be written"),
        (("batch", path, out, "-m", str(tmp_path / "model")), "model"),
    ):
        status, _, shown = run(capsys, *arguments)
        assert status == 1 and message in shown, shown
        assert Path(path).read_text() == json.dumps(request("a")) + "\n"


def test_empty_batch_writes_an_empty_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "in", [])
    assert run(capsys, "batch", str(path), str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out").read_bytes() == b""
