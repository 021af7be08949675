"""Shared code of the drivers of the drafting benchmark: the same requests, with and without draft
tokens, in turns in one process.

A job is a JSON object on the command line. Its fields are "model" (path), "requests" (a JSON file;
the first one warms up), "threads", "round" and "options" of the engine. `"guesses"` holds the
numbers of draft tokens. Each printed line is one answer: {"variant", "request", "metrics",
"token_ids", "others"}. Standard library only.
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
    """An answer and its time.

    token_ids: the tokens without the stop token.
    num_timed: the tokens after the first, with the stop token.
    seconds: the time of the timed tokens.
    num_tried, num_right: draft tokens verified, and accepted.
    """

    token_ids: list[int]
    num_timed: int
    seconds: float
    num_tried: int
    num_right: int

    @classmethod
    def of(
        cls, request: Request, token_ids: list[int], seconds: float, num_tried: int, num_right: int
    ) -> "Answer":
        """Return the answer from token ids that include the stop token."""
        answer_ids = token_ids[:-1] if token_ids[-1] == request.stop else token_ids
        return cls(answer_ids, len(token_ids) - 1, seconds, num_tried, num_right)


Answerer = Callable[[Request], Answer]


@dataclass(frozen=True)
class Job:
    """The work of one process."""

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
        """Return the maximum length of a prompt, its answer, and draft tokens beyond it."""
        return max(len(r.prompt) + r.count for r in self.requests) + max(self.guesses) + 1


def turns(names: list[str], first: int) -> Iterator[str]:
    first %= len(names)
    yield from names[first:] + names[:first]


def race(job: Job, answerers: dict[str, Answerer]) -> Iterator[dict[str, Any]]:
    """Let each variant answer each request; the first variant changes with every request."""
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
    """Run a driver's main function. make: returns the engine's variants by name; PLAIN has no
    drafts."""
    job = Job.of(sys.argv[1])
    with make(job) as answerers:
        for line in race(job, answerers):
            print(json.dumps(line), flush=True)
