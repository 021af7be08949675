"""Measure the start of `quire serve` up to a chat's first token; idle processor time; wheel and
dependencies.

    python -m benchmarks.server.startup

Start-up: from starting the command in a fresh interpreter, until the first text of a streamed chat
has arrived. The client retries every 10 ms until the server listens. The first round, which fills
the file caches, does not count.

Idle: processor time of all processes of a server that has answered once, while no request arrives.

Weights: `LLM` with --weights-model in a fresh process, from importing torch to one token after a
prompt of 16. The starts run first without a cache of packed weights, then with one, which the first
of them fills. The peak of resident memory includes mapped weights.

Wheel: built from this checkout, with the C++ core. Dependencies: the packages that the distribution
names, and all that these need on this machine.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.result_files import Row, options_of, write
from benchmarks.server.servers import free_port, running
from quire.tools.http_client import HttpClient, HttpError
from quire.tools.report import benchmark_parser, plain_facts

ROOT = Path(__file__).parents[2]
RETRY_S = 0.01
FIRST_TOKEN = """
import sys
from quire import LLM, SamplingParams
model, quantization, cache = sys.argv[1:]
llm = LLM(model, dtype="bfloat16", quantization=quantization, weight_cache=cache,
          max_model_len=512, disable_log_stats=True)
prompt = {"prompt_token_ids": list(range(100, 116))}
llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""
GIVE_UP_S = 120.0
AIMS = {"start_s": 4.0, "weights_s": 3.0, "idle": 0.005, "wheel_mb": 15, "dependencies": 20}


def command(model: str, port: int) -> list[str]:
    serve = [sys.executable, "-m", "quire.cli.main", "serve", model, "--port", str(port)]
    return [*serve, "--log-level", "warning"]


async def first_text(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return when a chat's first text is there. Raises HttpError after GIVE_UP_S."""
    client = HttpClient(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + GIVE_UP_S
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "stream": True}
    while True:
        try:
            async with aclosing(client.stream_json("/v1/chat/completions", body)) as payloads:
                async for payload in payloads:
                    if json.loads(payload)["choices"][0]["delta"].get("content"):
                        return
            raise SystemExit("the chat ended without a text")
        except HttpError as error:
            is_over = time.monotonic() > deadline or process.poll() is not None
            if error.status not in (0, 503) or is_over:
                raise
        await asyncio.sleep(RETRY_S)


def start_times_s(options: argparse.Namespace) -> list[float]:
    times = []
    for _ in range(options.rounds + 1):
        port, began = free_port(), time.perf_counter()
        with running(command(options.model, port)) as process:
            asyncio.run(first_text(port, process))
            times.append(time.perf_counter() - began)
    return times[1:]


def start_with_weights(options: argparse.Namespace) -> dict[str, list[tuple[float, int]]]:
    """Return (seconds, peak bytes of memory) of each start, by format: without a cache, then with
    one."""
    found: dict[str, list[tuple[float, int]]] = {}
    for quantization in options.weights_formats:
        with tempfile.TemporaryDirectory() as directory:
            for cache in ["off"] + [directory] * (options.rounds + 1):
                arguments = [options.weights_model, quantization, cache]
                began = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", FIRST_TOKEN, *arguments],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                seconds = time.perf_counter() - began
                found.setdefault(quantization, []).append((seconds, int(done.stdout) * 1024))
    return found


def print_weights(found: dict[str, list[tuple[float, int]]]) -> None:
    for name, ((off_s, off_bytes), (fill_s, _), *cached) in found.items():
        print(
            f"{name}: first token after {off_s:.2f} s without a cache ({off_bytes / 1e6:,.0f} MB),"
            f" {fill_s:.2f} s filling it, then median"
            f" {statistics.median(s for s, _ in cached):.2f} s, min {min(cached)[0]:.2f} s"
            f" ({cached[0][1] / 1e6:,.0f} MB) (aim {AIMS['weights_s']:g})", flush=True,
        )  # fmt: skip


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for process in found:  # grows
        found += children.get(process, [])
    return found


def cpu_s(processes: list[int]) -> dict[int, float]:
    """Return the user and system seconds of each process."""
    used = {}
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        used[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def idle_share(options: argparse.Namespace) -> dict[str, Any]:
    """Return the share of one core that all processes use together while idle."""
    port = free_port()
    with running(command(options.model, port)) as process:
        asyncio.run(first_text(port, process))
        time.sleep(2.0)  # what the request left to do
        processes = tree(process.pid)
        before, began = cpu_s(processes), time.monotonic()
        time.sleep(options.idle_s)
        after, elapsed_s = cpu_s(processes), time.monotonic() - began
    used = [after[each] - before[each] for each in processes]
    return {
        "idle_share_of_a_core": sum(used) / elapsed_s,
        "idle_s": elapsed_s,
        "idle_cpu_s_by_process": used,
    }


def wheel_bytes() -> int:
    """Return the size of a wheel built in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
        places = [f"--config-settings=build-dir={directory}/build", "-w", directory, str(ROOT)]
        subprocess.run([*command, "-q", "--disable-pip-version-check", *places], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        return wheel.stat().st_size


def dependencies(package: str) -> set[str]:
    """Return the names that a distribution requires without extras, on this machine."""
    names = set()
    for line in metadata.requires(package) or []:
        requirement, _, marker = line.partition(";")
        if "extra ==" not in marker:
            name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
            names.add(re.sub(r"[-_.]+", "-", name).lower())
    return names


def installed_closure(package: str) -> set[str]:
    """Return all distributions that a package needs. Those with markers that do not hold are not
    installed, and not counted."""
    found, open_names = set(), dependencies(package)
    while open_names:
        name = open_names.pop()
        try:
            more = dependencies(name)
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        open_names |= more - found
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--idle-s", type=float, default=60.0, help="0 leaves this out")
    parser.add_argument("--weights-model", default="shape:qwen3-0.6b")
    formats = ("none", "int8", "int4")
    parser.add_argument("--weights-formats", nargs="*", choices=formats, default=formats)
    parser.add_argument("--no-wheel", action="store_true", help="leave the wheel out")
    options = parser.parse_args()
    facts = plain_facts()
    print(f"# {facts['cpu']}, {facts['cores']} cores; {facts['date']}, commit {facts['commit']}")
    times = start_times_s(options)
    results: dict[str, Any] = {"model_id": options.model, "start_s": times}
    print(
        f"command to first text of a chat: min {min(times):.2f} s, median"
        f" {statistics.median(times):.2f} s of {len(times)} (aim {AIMS['start_s']:g})", flush=True,
    )  # fmt: skip
    if options.idle_s > 0:
        results |= idle_share(options)
        share = results["idle_share_of_a_core"]
        print(
            f"idle server: {share:.2%} of a core over {results['idle_s']:.0f} s"
            f" (aim {AIMS['idle']:.1%})", flush=True,
        )  # fmt: skip
    results["start_with_weights"] = start_with_weights(options)
    print_weights(results["start_with_weights"])
    if not options.no_wheel:
        results["wheel_bytes"] = wheel_bytes()
        megabytes = results["wheel_bytes"] / 1e6
        print(f"wheel: {megabytes:.1f} MB (aim {AIMS['wheel_mb']:g})", flush=True)
    results["dependencies"] = sorted(dependencies("quire"))
    results["installed_closure"] = sorted(installed_closure("quire"))
    print(
        f"dependencies: {len(results['dependencies'])} (aim {AIMS['dependencies']}), with theirs"
        f" {len(results['installed_closure'])} distributions on this machine"
    )
    weights = results.pop("start_with_weights")
    rows: list[Row] = [{"part": "server", **results}]
    for name, starts in weights.items():
        seconds, max_bytes = zip(*starts, strict=True)
        rows.append({"part": "weights", "format": name, "seconds": list(seconds),
                     "most_bytes": list(max_bytes)})  # fmt: skip
    write(options.output_json, "server.startup", rows, options_of(options), plain_facts)


if __name__ == "__main__":
    main()
