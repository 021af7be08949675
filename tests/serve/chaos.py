"""Run every kind of load while processes are killed: python -m tests.serve.chaos --minutes 20.

The server has two API processes, host memory and a directory for cached blocks. Its pool is so
small that requests are preempted. Clients of every kind send requests, and some disconnect.
Prefixes are pinned and removed. In turn the core, an API process and the supervisor are killed
(kill -9), and a core hangs. Each answer must equal an undisturbed server's. At rest no block may
be in use, and at the end no process or file may remain. Prints a summary as JSON; exit status 1
if a fault was found.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.serve.processes.launch import remove_abandoned_sockets
from quire.tools.http_client import HttpClient, HttpError
from tests.support.processes.servers import Server, children_of, is_running, kill, wait_until
from tests.support.serve.chaos_cases import WORDS, Answer, Asker, Case, Cut, Wrong, make_cases

# A supervisor gives up on a core that dies four times in two minutes, so others die in between.
VICTIMS = ("core", "api", "supervisor", "core while it loads", "api", "supervisor", "hung core",
           "api")  # fmt: skip
PERIOD_S = 18.0  # between two kills
CALM_S = 60.0  # for everything to be released
SAMPLED = ("num_preemptions_total", "kv_blocks_loaded_total", "kv_blocks_fetched_total",
           "kv_blocks_kept_total", "pinned_prefix_hits_total")  # fmt: skip
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
          "pinned_kv_blocks", "pinned_prefixes")  # fmt: skip


class Chaos:
    """One run. wrong: the faults that were found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._rng = random.Random(options.seed)
        self._cases = make_cases(self._rng, options.cases)
        self._expected: dict[int, Answer] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._server: Server | None = None
        self._open = asyncio.Event()  # clients may send requests
        self._num_asking = 0
        self._used: collections.Counter[str] = collections.Counter()  # of the core's metrics
        self._slowest_s = {"health": 0.0, "refusal": 0.0}
        self._rss_mb: list[dict[str, float]] = []
        self.wrong: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Return the summary."""
        shared = set(os.listdir("/dev/shm"))
        await self._collect_expected()
        await self._start()
        until_s = time.monotonic() + 60 * self._options.minutes
        clients = [asyncio.create_task(self._client(i)) for i in range(self._options.clients)]
        clients += [asyncio.create_task(self._pins()), asyncio.create_task(self._health())]
        self._open.set()
        number = 0
        try:
            while time.monotonic() < until_s and not any(task.done() for task in clients):
                await asyncio.sleep(PERIOD_S)
                await self._strike(VICTIMS[number % len(VICTIMS)])
                number += 1
                if number % 2 == 0:
                    await self._calm()
            await self._calm()
        except (AssertionError, OSError, HttpError) as error:
            self.wrong.append(f"strike {number}: {error}")
        for task in clients:
            task.cancel()
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                self.wrong.append(f"a client failed: {result!r}")
        try:
            await self._end(shared)
        except (AssertionError, OSError) as error:
            self.wrong.append(f"the end: {error}")
        return {
            "minutes": self._options.minutes, "seed": self._options.seed, "strikes": number,
            "outcomes": dict(sorted(self._counts.items())), "used": dict(self._used),
            "slowest_s": {k: round(v, 3) for k, v in self._slowest_s.items()},
            "rss_mb": self._rss_mb, "wrong": self.wrong,
            "log": self.server.lines[-60:] if self.wrong else [],
        }  # fmt: skip

    # ---- servers -----------------------------------------------------------------------------

    async def _collect_expected(self) -> None:
        """Collect the answer of each case from an undisturbed server with enough memory."""
        server = await asyncio.to_thread(Server, "--max-model-len", "512", is_fork=False)
        asker = Asker(server.url, None)
        for case in self._cases:
            found = await asker.ask(case, self._rng)
            assert found is not None
            self._expected[case.number] = found
        assert await asyncio.to_thread(server.stop) == 0

    async def _start(self) -> None:
        self._server = await asyncio.to_thread(
            Server, "--max-model-len", "512", "--max-num-seqs", "12", "--api-server-count", "2",
            "--restart-engine", "--kv-cache-memory-bytes", str(self._options.pool_bytes),
            "--kv-host-gb", "0.003", "--kv-disk-dir", str(self._folder / "blocks"),
            "--kv-disk-gb", "0.02", "--max-num-queued-reqs", "6", "--shutdown-timeout", "30",
            is_fork=False,
        )  # fmt: skip

    def kill(self) -> None:
        """Kill the server, whatever happened."""
        if self._server is not None:
            self._server.process.kill()
            self._server.process.wait()

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    # ---- clients -----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _asking(self) -> Any:
        await self._open.wait()
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1

    async def _client(self, index: int) -> None:
        rng = random.Random(1000 * self._options.seed + index)
        while True:
            async with self._asking():
                await self._ask(rng.choice(self._cases), rng)
            await asyncio.sleep(rng.random() * 0.1)

    async def _ask(self, case: Case, rng: random.Random) -> None:
        began = time.monotonic()
        try:
            found = await Asker(self.server.url, self._expected).ask(case, rng)
            self._counts["left" if found is None else f"ok {case.kind}"] += 1
        except Cut as error:
            is_busy = "are waiting already" in str(error)
            self._counts["busy" if is_busy else "cut"] += 1
            if is_busy and case.kind != "pieces":  # pieces are sent slowly
                self._note("refusal", began)
            await asyncio.sleep(0.2)
        except Wrong as error:
            self.wrong.append(str(error))
        except TimeoutError:
            self.wrong.append(f"case {case.number} was not answered")

    async def _pins(self) -> None:
        """Pin prefixes of the cases' prompts, and remove most of them."""
        rng = random.Random(7 * self._options.seed)
        while True:
            async with self._asking():
                client = HttpClient(self.server.url)
                prompt = rng.choice(self._cases).body.get("prompt") or " ".join(WORDS)
                body = {"prompt": prompt[: rng.randint(20, 120)], "ttl_s": rng.choice((0, 1, 5))}
                try:
                    made = (await client.request("/v1/prefixes", "POST", body, timeout_s=60)).json()
                    self._counts["pinned"] += 1
                    if rng.random() < 0.7:
                        path = f"/v1/prefixes/{made['id']}"
                        await client.request(path, "DELETE", timeout_s=60)
                except HttpError as error:
                    if error.status not in (0, 400, 404, 503):
                        self.wrong.append(f"pinning: status {error.status}: {error}")
                    self._counts[f"not pinned ({error.status})"] += 1
                await client.close()
            await asyncio.sleep(0.5)

    async def _health(self) -> None:
        """Measure how long /health takes."""
        while True:
            async with self._asking():
                began = time.monotonic()
                with contextlib.suppress(HttpError):
                    client = HttpClient(self.server.url)
                    await client.request("/health", timeout_s=30)
                    self._note("health", began)
                    await client.close()
            await asyncio.sleep(0.25)

    def _note(self, what: str, began: float) -> None:
        self._slowest_s[what] = max(self._slowest_s[what], time.monotonic() - began)

    # ---- kills -------------------------------------------------------------------------------

    async def _strike(self, victim: str) -> None:
        server, self._counts[f"killed {victim}"] = self.server, self._counts[f"killed {victim}"] + 1
        server.children = _children(server)
        if victim == "supervisor":
            self._open.clear()  # requests without a server prove nothing
            family = _family(server)
            kill(server.process.pid)
            await asyncio.to_thread(server.process.wait, 20)
            gone = lambda: not any(map(is_running, family))  # noqa: E731
            await asyncio.to_thread(wait_until, gone, "the children have died", 10)
            if server.get("/health") != 0:
                self.wrong.append("a process listens after the supervisor's death")
            await self._start()
            self._open.set()
        elif victim == "api":
            victim_pid = self._rng.choice(server.api)
            family = set(children_of(victim_pid))
            await self._replaced(victim_pid, signal.SIGKILL)
            gone = lambda: not any(map(is_running, family))  # noqa: E731
            await asyncio.to_thread(wait_until, gone, "its children have died", 10)
        else:
            is_hung = victim == "hung core"
            await self._replaced(server.core, signal.SIGSTOP if is_hung else signal.SIGKILL)
            if victim == "core while it loads":
                server.children = _children(server)
                await self._replaced(server.core, signal.SIGKILL)
        is_well = lambda: all(self.server.get("/health") == 200 for _ in range(6))  # noqa: E731
        await asyncio.to_thread(wait_until, is_well, f"{victim} is replaced", 90)

    async def _replaced(self, pid: int, number: int) -> None:
        """Signal a process; return when the supervisor has noticed its end."""
        server = self.server

        def num_notices() -> int:
            return sum("restarting it" in line for line in server.lines)

        before = num_notices()
        kill(pid, number)
        await asyncio.to_thread(
            wait_until, lambda: num_notices() > before, "the end is noticed", 60
        )

    async def _calm(self) -> None:
        """Wait until no request is open; then nothing may be in use."""
        self._open.clear()
        try:
            await asyncio.wait_for(self._until_quiet(), 130)
            await self._unpin()
            is_released = lambda: not any(self.server.metric(f"quire:{name}") for name in GAUGES)  # noqa: E731
            await asyncio.to_thread(wait_until, is_released, "everything is released", CALM_S)
        except (AssertionError, TimeoutError) as error:
            held = {name: self.server.metric(f"quire:{name}") for name in GAUGES}
            self.wrong.append(f"at rest something is in use ({error}): {held}")
        for name in SAMPLED:
            self._used[name] = int(max(self._used[name], self.server.metric(f"quire:{name}")))
        self.server.children = _children(self.server)
        self._rss_mb.append(_rss_mb(self.server))
        self._counts["calm"] += 1
        done = sum(number for name, number in self._counts.items() if name.startswith("ok"))
        print(f"calm {self._counts['calm']}: {done} answers, {len(self.wrong)} wrong",
              file=sys.stderr, flush=True)  # fmt: skip
        self._open.set()

    async def _until_quiet(self) -> None:
        while self._num_asking:
            await asyncio.sleep(0.05)

    async def _unpin(self) -> None:
        client = HttpClient(self.server.url)
        for prefix in (await client.request("/v1/prefixes")).json()["data"]:
            with contextlib.suppress(HttpError):
                await client.request(f"/v1/prefixes/{prefix['id']}", "DELETE")
        await client.close()

    async def _end(self, shared: set[str]) -> None:
        server = self.server
        server.children = _children(server)
        family = _family(server)
        status = await asyncio.to_thread(server.stop)
        if status != 0:
            self.wrong.append(f"the server ended with status {status}")
        if any(map(is_running, family)):
            self.wrong.append("a process outlived the server")
        for home in self._folder.glob("quire-*"):  # age those of killed supervisors
            for path in (home / "core.sock", home):
                os.utime(path, (0, 0))
        remove_abandoned_sockets()
        left = [path.name for path in self._folder.iterdir() if path.name != "blocks"]
        left += [path.name for path in (self._folder / "blocks").rglob("tmp/*")]
        left += sorted(set(os.listdir("/dev/shm")) - shared)
        if left:
            self.wrong.append(f"abandoned: {left}")
        odd = [line for line in server.lines if re.search(r"Traceback|leaked|orphan", line)]
        self.wrong += odd


def _children(server: Server) -> dict[int, str]:
    found: dict[int, str] = {}

    def complete() -> bool:
        found.clear()
        found.update(children_of(server.process.pid))
        return len(found) == 3 and all("quire.serve" in command for command in found.values())

    wait_until(complete, "all three processes run", 60)
    return found


def _family(server: Server) -> set[int]:
    """Return the pids of the supervisor's children and grandchildren."""
    children = set(children_of(server.process.pid))
    return children.union(*(children_of(pid) for pid in children))


def _rss_mb(server: Server) -> dict[str, float]:
    names = {server.process.pid: "supervisor", server.core: "core"}
    names |= {pid: f"api {i}" for i, pid in enumerate(sorted(server.api))}
    found = {}
    for pid, name in names.items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[name] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
        found[f"{name} files"] = float(len(os.listdir(f"/proc/{pid}/fd")))
    return found


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield the folder for temporary files of this process and its children."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield Path(folder)
        tempfile.tempdir = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=56)
    parser.add_argument("--clients", type=int, default=14)
    parser.add_argument("--pool-bytes", type=int, default=5_000_000, help="of the KV pool")
    options = parser.parse_args()
    with temporary_folder() as folder:
        chaos = Chaos(options, folder)
        try:
            summary = asyncio.run(chaos.run())
        finally:
            chaos.kill()
    print(json.dumps(summary, indent=1))
    return 1 if chaos.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
