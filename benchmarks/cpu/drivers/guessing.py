"""What the drivers of the race of guesses share: the same requests, without guesses and with, in
turns in one process.

A job is a JSON object on the command line: "model" (path), "requests" (a JSON file; the first one
warms up), "guesses" (numbers of tokens), "threads", "round" and "options" of the engine. Each
printed line is one answer: {"variant", "request", "metrics", "token_ids", "others"}. Standard
library only.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.noise import Noise

PLAIN = "plain"


@dataclass(frozen=True)
class Request:
    """stop: the token that ends the answer, None: nothing does before `count` tokens."""

    prompt: list[int]
    count: int
    stop: int | None


@dataclass(frozen=True)
class Answer:
    """token_ids: without the one that stopped it. num_timed: tokens behind the first, with the one
    that stopped it; seconds: what they took. num_tried, num_right: guesses."""

    token_ids: list[int]
    num_timed: int
    seconds: float
    num_tried: int
    num_right: int

    @classmethod
    def of(
        cls, request: Request, token_ids: list[int], seconds: float, num_tried: int, num_right: int
    ) -> "Answer":
        """token_ids: with the one that stopped it."""
        kept = token_ids[:-1] if token_ids[-1] == request.stop else token_ids
        return cls(kept, len(token_ids) - 1, seconds, num_tried, num_right)


Answerer = Callable[[Request], Answer]


@dataclass(frozen=True)
class Job:
    """What one process does."""

    model: Path
    requests: list[Request]
    guesses: list[int]
    threads: int
    round: int
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> "Job":
        given = json.loads(text)
        requests = [Request(**each) for each in json.loads(Path(given["requests"]).read_text())]
        return cls(
            Path(given["model"]), requests, given["guesses"], given["threads"], given["round"],
            given["options"],
        )  # fmt: skip

    @property
    def max_len(self) -> int:
        """Of a prompt, its answer, and guesses that reach beyond it."""
        return max(len(r.prompt) + r.count for r in self.requests) + max(self.guesses) + 1


def turns(names: list[str], first: int) -> Iterator[str]:
    first %= len(names)
    yield from names[first:] + names[:first]


def race(job: Job, answerers: dict[str, Answerer]) -> Iterator[dict[str, Any]]:
    """Each variant answers each request; every request begins with another one."""
    warm_up, *requests = job.requests
    for answerer in answerers.values():
        answerer(warm_up)
    noise = Noise()
    found: list[tuple[str, int, Answer]] = []
    for number, request in enumerate(requests):
        for variant in turns(list(answerers), number + job.round):
            found.append((variant, number, answerers[variant](request)))
    others = noise.others()
    for variant, number, answer in found:
        metrics = asdict(answer)
        token_ids = metrics.pop("token_ids")
        yield {"variant": variant, "request": number, "metrics": metrics, "token_ids": token_ids,
               "others": others}  # fmt: skip


def drive(make: Callable[[Job], AbstractContextManager[dict[str, Answerer]]]) -> None:
    """A driver's main function. make: the engine without guesses, by the name PLAIN, and with."""
    job = Job.of(sys.argv[1])
    with make(job) as answerers:
        for line in race(job, answerers):
            print(json.dumps(line), flush=True)
