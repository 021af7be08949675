"""llama.cpp's own server, with its n-grams (`--spec-type`). options: "server", the program.

Times are the server's own, without HTTP.
"""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.cpu.drivers.drafting import PLAIN, Answer, Answerer, Job, Request, drive

MAX_START_S = 120.0
RUN = 3  # tokens that are looked for; by default 12, which are seldom found in short answers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command(job: Job, port: int, own: list[str]) -> list[str]:
    return [
        job.options["server"], "-m", str(job.model), "--host", "127.0.0.1", "--port", str(port),
        "-c", str(job.max_len), "-np", "1", "-t", str(job.threads), "-tb", str(job.threads),
        *own,
    ]  # fmt: skip


def variants(draft_lengths: list[int]) -> dict[str, list[str]]:
    """Return the server's flags by variant. Its authors recommend 48 to 64 draft tokens."""
    found: dict[str, list[str]] = {PLAIN: []}
    for num in draft_lengths:
        sizes = ["--spec-ngram-simple-size-n", str(RUN), "--spec-ngram-simple-size-m", str(num)]
        found[f"ngram-simple {num}"] = ["--spec-type", "ngram-simple", *sizes]
    return found | {"spec-default 64": ["--spec-default"]}


def call_server(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + MAX_START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with status {process.returncode}")
        try:
            call_server(port, "/health")
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"llama-server was not ready after {MAX_START_S:.0f} s")


def answerer(port: int) -> Answerer:
    def answer(request: Request) -> Answer:
        body = {
            "prompt": request.prompt, "n_predict": request.count, "temperature": 0.0,
            "cache_prompt": False, "return_tokens": True, "ignore_eos": request.stop is None,
        }  # fmt: skip
        found = call_server(port, "/completion", body)
        times = found["timings"]
        token_ids = [token for token in found["tokens"] if token != request.stop]
        drafted, right = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        seconds = times["predicted_ms"] / 1e3
        return Answer(token_ids, times["predicted_n"] - 1, seconds, drafted, right)

    return answer


@contextmanager
def answerers(job: Job) -> Iterator[dict[str, Answerer]]:
    with ExitStack() as stack:
        found = {}
        for name, own in variants(job.guesses).items():
            port = free_port()
            process = stack.enter_context(
                subprocess.Popen(command(job, port, own), stdout=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            wait_until_ready(port, process)
            found[name] = answerer(port)
        yield found


if __name__ == "__main__":
    drive(answerers)
