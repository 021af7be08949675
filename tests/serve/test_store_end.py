"""Shutdown with a slow store: processes wait for it as long as documented, and no longer."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quire.serve.processes.launch as launch
import quire.serve.supervisor as supervisor
from quire import AsyncLLM, SamplingParams
from quire.base.kv_orders import KEEP_AT_END_S
from quire.base.plugins import CONNECTORS
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.observability.heartbeat import FIELDS
from quire.serve.processes.children import Child, CoreChild
from quire.serve.processes.cores import ALONE
from quire.serve.several.served import FirstRequest, ServedModel
from tests.support.plugin_site import Site
from tests.support.processes.servers import WAIT_S, Server

SOURCE = '''
import time
from pathlib import Path


class SlowStore:
    """Files in a folder, of which each takes a while. address: the folder, a comma, seconds."""

    def __init__(self, address, max_bytes):
        folder, _, self.put_s = address.rpartition(",")
        self.folder = Path(folder)

    def find(self, keys):
        return [(self.folder / key.hex()).exists() for key in keys]

    def get(self, keys):
        yield from [None] * len(keys)

    def put(self, key, parts):
        time.sleep(float(self.put_s))
        (self.folder / key.hex()).write_bytes(b"".join(parts))
        return True

    def remove(self, keys):
        pass

    def close(self):
        (self.folder / "closed").write_bytes(b"")
'''
NUM_BLOCKS = 25  # of 16 tokens
PROMPT = [5 + i for i in range(16 * NUM_BLOCKS)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the store's files; its package is installed."""
    site, kept = tmp_path / "site", tmp_path / "kept"
    for made in (site, kept):
        made.mkdir()
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    Site(site).install("quire-slow", CONNECTORS, "slow", "quire_slow:SlowStore", SOURCE)
    return kept


def num_kept(folder: Path) -> int:
    assert (folder / "closed").exists(), "the core was killed before it closed the store"
    return len(list(folder.iterdir())) - 1


def test_server_stores_cached_blocks_even_with_a_short_drain(folder: Path) -> None:
    """Storing takes longer than other processes may take to end."""
    shorter = (
        "from quire.serve import supervisor; from quire.serve.processes import launch;"
        " launch.END_S = supervisor.END_S = 2.0"
    )
    store = f"slow:{folder},{1.2 * 2.0 / NUM_BLOCKS}"
    server = Server("--kv-store", store, "--shutdown-timeout", "0", before=shorter)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        assert connection.getresponse().status == 200
        connection.close()
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert num_kept(folder) == NUM_BLOCKS
    assert not any("does not stop" in line for line in server.lines)


def test_core_of_asyncllm_stores_cached_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "END_S", 0.5)
    settings = {"kv_store": f"slow:{folder},0.04", "disable_log_stats": True}

    async def program() -> None:
        async with await AsyncLLM.create("demo", **settings) as llm:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            async for _ in llm.generate({"prompt_token_ids": PROMPT}, params):
                pass

    asyncio.run(program())
    assert num_kept(folder) == NUM_BLOCKS


STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); input()"
SLOW = """
import signal, sys, time
signal.signal(15, lambda *_: (time.sleep(1), sys.exit(7)))
print('ready', flush=True)
while True:
    signal.pause()
"""


def test_stuck_api_process_does_not_shorten_the_cores_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The API process is killed when its time is over. Only then is the core stopped: it has all of
    its own time, without a check whether it is stuck."""
    for module in (launch, supervisor):
        monkeypatch.setattr(module, "END_S", 0.2)
    settings = config_from_flat(model="demo", kv_disk_dir="/nowhere")
    with socket.socket() as tcp, contextlib.closing(launch.CoreSocket()) as unix:
        cores = [supervisor.ServedCore(ServedModel(settings), ALONE, unix)]
        watcher = supervisor.Supervisor(
            ServerConfig(), "info", tcp, cores, FirstRequest("/v1/models", {})
        )
        unix.heartbeat.write_bytes(FIELDS.pack(time.monotonic() + 0.7, 1))
        api, core = (
            subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for code in (STUBBORN, SLOW)
        )
        try:
            for process in (api, core):
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            watcher._apis = [Child("the API process", lambda: api, may_restart=True)]
            child = Child("the core", lambda: core, may_restart=True)
            watcher._cores = [CoreChild(child, unix.path, unix.heartbeat)]
            watcher._start_due()
            watcher._end(0, 0.0)
            while any(child.is_running for child in watcher._children):
                watcher._watch()
        finally:
            for process in (api, core):
                process.kill()
                process.communicate()
    assert (api.returncode, core.returncode) == (-signal.SIGKILL, 7)
    assert watcher._status == 1, "neither process ended cleanly"


def test_only_cores_with_stores_get_the_longer_shutdown() -> None:
    assert launch.core_end_s(config_from_flat(model="demo")) == launch.END_S
    with_stores = config_from_flat(model="demo", kv_disk_dir="/nowhere")
    assert launch.core_end_s(with_stores) == launch.END_S + KEEP_AT_END_S
