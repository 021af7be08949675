"""Batches of a real server with two API processes, through openai's own client."""

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.processes.servers import Server, is_running, kill, wait_until
from tests.support.serve.batch_files import request, write
from tests.support.serve.direct_engine import text_of

FLAGS = ("--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M")


def start(folder: Path) -> Server:
    return Server("--api-server-count", "2", "--files-dir", str(folder / "kept"), *FLAGS)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)


def begin(client: openai.OpenAI, folder: Path, number: int) -> Any:
    lines = [request(f"r{index}", f"{index} foxes") for index in range(number)]
    for line in lines:
        line["body"] |= {"max_tokens": 32, "ignore_eos": True}
    with write(folder / "in.jsonl", lines).open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    assert uploaded.filename == "in.jsonl"
    return client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h"
    )


def runner_of(folder: Path) -> int:
    """Return the process that runs batches, which holds the lock."""
    inode = (folder / "kept" / "runner.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        if line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}"):
            return int(line.split()[4])
    raise AssertionError("no process runs batches")


def num_written(folder: Path) -> int:
    """Count the written lines of batches that are not done."""
    return sum(p.read_bytes().count(b"\n") for p in (folder / "kept").glob("*.output"))


def check(client: openai.OpenAI, batch: Any, number: int) -> None:
    """Check that each line was answered once, with the engine's text."""
    assert (batch.request_counts.completed, batch.request_counts.failed) == (number, 0)
    content = client.files.content(batch.output_file_id).text
    answers = {}
    for line in map(json.loads, content.splitlines()):
        assert line["custom_id"] not in answers
        answers[line["custom_id"]] = line["response"]["body"]["choices"][0]["text"]
    assert len(answers) == number
    for index in range(0, number, number // 3):
        wanted = text_of(f"{index} foxes", max_tokens=32, ignore_eos=True)
        assert answers[f"r{index}"] == wanted


def test_batch_survives_its_api_process(tmp_path: Path) -> None:
    server = start(tmp_path)
    try:
        client = client_of(server)
        batch = begin(client, tmp_path, 30)
        wait_until(lambda: num_written(tmp_path) >= 5)
        retrieved = [client.batches.retrieve(batch.id) for _ in range(4)]  # from either process
        assert {each.request_counts.total for each in retrieved} == {30}
        pid = runner_of(tmp_path)
        assert pid in server.api
        kill(pid)
        live = client.with_options(max_retries=9)
        answer = live.completions.create(model="demo", prompt="The sea", max_tokens=4)
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        wait_until(lambda: live.batches.retrieve(batch.id).status == "completed")
        assert runner_of(tmp_path) != pid
        batch = live.batches.retrieve(batch.id)
        check(live, batch, 30)
        assert [each.id for each in live.batches.list(limit=1)] == [batch.id]
        assert len(list(live.files.list())) == 2
        second = begin(live, tmp_path, 60)
        assert live.batches.cancel(second.id).status == "cancelling"
        wait_until(lambda: live.batches.retrieve(second.id).status == "cancelled")
        assert live.files.delete(batch.output_file_id).deleted
    finally:
        status = server.stop()
    assert status == 0


@pytest.mark.slow
def test_batch_survives_the_server(tmp_path: Path) -> None:
    """The server is killed with all its processes three times, and stopped once."""
    number, batch = 600, None
    for sent in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        server = start(tmp_path)
        client = client_of(server)
        if batch is None:
            batch = begin(client, tmp_path, number)
        before = num_written(tmp_path)
        wait_until(functools.partial(has_more, tmp_path, before))
        os.kill(server.process.pid, sent)
        server.process.wait(60)
        wait_until(lambda pids=tuple(server.children): not any(map(is_running, pids)))
    server = start(tmp_path)
    try:
        client = client_of(server)
        assert batch is not None
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", timeout_s=120)
        check(client, client.batches.retrieve(batch.id), number)
    finally:
        server.stop()


def has_more(folder: Path, before: int) -> bool:
    return num_written(folder) > before + 20
