"""A server that gets little CPU or is stopped repeatedly: it is slow, but no process is killed.
Covers `engine/observability/starvation.py` and `engine/attachments/loading.py` from outside."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.test_attacks import post
from tests.serve.test_server import started
from tests.support.models.pooling_checkpoints import with_modules
from tests.support.models.reference_checkpoints import text_checkpoint
from tests.support.processes.servers import WAIT_S, Server, is_running, kill, wait_until
from tests.support.serve.batch_files import request

SHARE = 0.1  # of a core
NUM_REQUESTS, NUM_EMBEDDINGS, NUM_AT_ONCE = 60, 6, 8
VECTORS = "vectors"  # name of the embedding model
PERIOD_S = 0.1
TOOL = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
SCHEMA = {"name": "colour", "schema": TOOL["parameters"]}
KINDS: list[dict[str, Any]] = [
    {},
    {"structured_outputs": {"regex": "[a-c]{4}"}},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"presence_penalty": 0.7, "repetition_penalty": 1.3},
    {"use_beam_search": True, "n": 2},
    {"temperature": 1.2, "top_k": 9, "seed": 3},
    {"min_tokens": 5},
    {"logit_bias": {"40": 3.0, "41": -100.0}},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    {"logprobs": True, "top_logprobs": 2},
]


def bodies(num: int, num_embeddings: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all kinds in turn, with different prompts; num includes embeddings."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(num):
        kind = number % (len(KINDS) + len(CHATS))
        text = f"Once upon a time {number}"
        if number < num_embeddings:
            found.append(("/v1/embeddings", {"model": VECTORS, "input": [text, "The fox"]}))
        elif kind < len(KINDS):
            body = {"prompt": text, "max_tokens": 8, "temperature": 0.0, **KINDS[kind]}
            found.append(("/v1/completions", body | {"model": "demo"}))
        else:
            chat = CHATS[kind - len(KINDS)]
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "max_tokens": 40, "temperature": 0.0, **chat}
            found.append(("/v1/chat/completions", body | {"model": "demo"}))
    return found


def answer(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Return the choices or vectors without random ids."""
    status, data = post(server, path, json.dumps(body).encode())
    assert status == 200, data
    found = json.loads(data)
    return without_ids(found["data"] if "data" in found else found["choices"])


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name != "id"}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def answers(server: Server, num: int, num_embeddings: int = 0) -> list[Any]:
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return list(pool.map(lambda each: answer(server, *each), bodies(num, num_embeddings)))


def assert_nothing_was_killed(server: Server) -> None:
    assert all(map(is_running, server.children))
    bad = ("makes no progress", "ended unexpectedly", "failed", "is stuck")
    lines = [line.replace(" 0 failed of ", "") for line in server.lines]  # of a batch
    assert not [line for line in lines if any(text in line for text in bad)]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_stopped_and_resumed_core_loses_no_answer() -> None:
    num = len(KINDS) + len(CHATS)
    with started() as server, ThreadPoolExecutor(num) as pool:
        pending = []
        for each in bodies(num):
            kill(server.core, signal.SIGSTOP)
            wait_until(lambda: state_of(server.core) == "T", "the core is stopped")
            pending.append(pool.submit(answer, server, *each))
            kill(server.core, signal.SIGCONT)
        found = [each.result(WAIT_S) for each in pending]
        assert found == answers(server, num)
        assert_nothing_was_killed(server)
        assert server.stop() == 0


# Waits where a real import takes its time: while the module runs, not while it is searched for,
# which holds the lock of all imports.
HOLD_TORCH = """
import os, sys, time
from importlib.machinery import PathFinder

class Hold:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def hold_and_run(module):
            open(os.environ["HELD"] + ".asked", "w").close()
            while os.path.exists(os.environ["HELD"]):
                time.sleep(0.01)
            run(module)

        spec.loader.exec_module = hold_and_run
        return spec

if "HELD" in os.environ and "quire.serve.processes.core_main" in sys.orig_argv:
    sys.meta_path.insert(0, Hold())
"""


@pytest.mark.slow
def test_slow_torch_import_does_not_delay_plain_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is imported after 15 s, longer than a core may go without progress."""
    with started() as server:
        wanted = answers(server, 3)
    held, asked = tmp_path / "held", tmp_path / "held.asked"
    (tmp_path / "sitecustomize.py").write_text(HOLD_TORCH)
    held.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HELD", str(held))
    with started() as server, ThreadPoolExecutor() as pool:
        assert not asked.exists(), "the second start needs no torch"
        plain, *others = bodies(3)
        pending = [pool.submit(answer, server, *each) for each in others]
        wait_until(asked.exists, "torch is being imported")
        began = time.monotonic()
        while time.monotonic() - began < 15.0:
            assert answer(server, *plain) == wanted[0]
        assert not any(each.done() for each in pending)
        held.unlink()
        assert [each.result(WAIT_S) for each in pending] == wanted[1:]
        assert_nothing_was_killed(server)
        assert server.stop() == 0


@contextlib.contextmanager
def restricted(pids: list[int]) -> Iterator[None]:
    """Give processes SHARE of a core together, by a cgroup or by stopping them in turn."""
    group = cpu_group()
    if group is not None:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            wait_until(lambda: is_emptied(group), "the group is empty")
            group.rmdir()
        return
    is_over = threading.Event()

    def cycle() -> None:
        while not is_over.is_set():
            for number, share in (signal.SIGSTOP, 1 - SHARE), (signal.SIGCONT, SHARE):
                for pid in pids:
                    kill(pid, number)
                is_over.wait(PERIOD_S * share)
        for pid in pids:
            kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def is_emptied(group: Path) -> bool:
    """Move all processes out of the group; return whether there were none."""
    pids = (group / "cgroup.procs").read_text().split()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            (group.parent / "cgroup.procs").write_text(pid)
    return not pids


def cpu_group() -> Path | None:
    """Make a control group with SHARE of a core; return None where that is not allowed."""
    quota_us, period_us = int(SHARE * PERIOD_S * 1e6), int(PERIOD_S * 1e6)
    settings = {
        Path("/sys/fs/cgroup"): {"cpu.max": f"{quota_us} {period_us}"},
        Path("/sys/fs/cgroup/cpu"): {"cpu.cfs_quota_us": str(quota_us)},
    }
    for root, files in settings.items():
        group = root / f"quire-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                for name, text in files.items():
                    with (group / name).open("r+") as file:  # only the kernel creates it
                        file.write(text)
                return group
            except OSError:
                group.rmdir()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("has_group", [True, False], ids=["quota", "stopped in turn"])
def test_answers_stay_correct_with_a_tenth_of_a_core(
    has_group: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_group:
        monkeypatch.setattr(f"{__name__}.cpu_group", lambda: None)
    embedder = with_modules(
        text_checkpoint("llama"), ("Pooling", "1_Pooling", {"pooling_mode": "mean"})
    )
    models = [{"model": "demo"}, {"model": str(embedder), "name": VECTORS}]
    config = tmp_path / "quire.yaml"
    config.write_text(json.dumps({"models": models}))
    words = ["--config", str(config), "--files-dir"]
    with started(*words, str(tmp_path / "one")) as server:
        wanted = answers(server, NUM_REQUESTS, NUM_EMBEDDINGS), batch_answers(server)
    with started(*words, str(tmp_path / "another")) as server:
        with restricted(list(server.children)), ThreadPoolExecutor(1) as pool:
            batch = pool.submit(batch_answers, server)
            found = answers(server, NUM_REQUESTS, NUM_EMBEDDINGS)
            assert (found, batch.result(2 * WAIT_S)) == wanted
        assert_nothing_was_killed(server)
        assert server.stop() == 0


def batch_answers(server: Server) -> dict[str, str]:
    """Run a batch alongside other requests; return its texts by the ids of its lines."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S)
    lines = [request(f"r{number}", f"{number} foxes") for number in range(4)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "it ends", WAIT_S)
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    answers = map(json.loads, client.files.content(output).text.splitlines())
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
