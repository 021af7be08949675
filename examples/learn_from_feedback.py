"""Learn from the ratings of users while a server answers them.

    quire serve demo --dtype bfloat16 --port 8000
    python examples/learn_from_feedback.py --url http://127.0.0.1:8000

Users ask for stories and rate them. This script plays the users, with a rule for ratings. With
consent, the script keeps token ids, log-probabilities and the rating until the next update. Rated
answers become a batch of policy gradient (docs/use/training-model.md). The server never pauses.
"""

import argparse
import json
import queue
import random
import re
import threading
import urllib.request
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save

from quire.training import TrainingModel

HEROES = ("cat", "dog", "bird", "fish", "frog", "mouse", "horse", "fox", "bear", "rabbit")
LR, MAX_RATIO = 3e-4, 2.0  # the ratio is of a token's probability now and then
MAX_SHARED = 1000  # ratings that wait for an update; more are dropped


@dataclass(frozen=True)
class Rated:
    """An answer, as token ids, whose user shares it."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    rating: float


def post(url: str, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """Send a POST request, and return the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    request = urllib.request.Request(url + path, data, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return dict(json.load(reply))


def rating_of(story: str) -> float:
    """Return how much a user likes a story, from 0 to 1: these users like five sentences."""
    return max(0.0, 1.0 - abs(len(re.findall(r"[.!?]", story)) - 5) / 5)


class Users:
    """Threads that ask for stories. shared: ratings with consent. num_answered: of all users."""

    def __init__(self, url: str, num_users: int, consent: float) -> None:
        self.shared: queue.Queue[Rated] = queue.Queue(MAX_SHARED)
        self.num_answered = 0
        self._url, self._consent, self._ended = url, consent, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(num_users)]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Let all users finish their current request."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        numbers = random.Random(number)
        while not self._ended.is_set():
            content = f"Tell me a short story about a {numbers.choice(HEROES)}."
            reply = post(self._url, "/v1/chat/completions", {
                "messages": [{"role": "user", "content": content}], "max_tokens": 160,
                "temperature": 1.0, "top_p": 1.0, "logprobs": True, "return_token_ids": True,
            })  # fmt: skip
            self.num_answered += 1
            if numbers.random() < self._consent and not self.shared.full():
                self.shared.put(self._rated(reply))

    def _rated(self, reply: dict[str, Any]) -> Rated:
        choice = reply["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        rating = rating_of(choice["message"]["content"])
        return Rated(reply["prompt_token_ids"], choice["token_ids"], logprobs, rating)


class Learner:
    """A trainer with the weights that the server has."""

    def __init__(self, url: str, model: str, dtype: str) -> None:
        self._url, self._model = url, TrainingModel(model, dtype=dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0)

    def learn(self, batch: list[Rated], version: str) -> None:
        """Make better rated answers more likely, and give the server the new weights."""
        old_R = torch.tensor([each for rated in batch for each in rated.logprobs])
        ratings_S = torch.tensor([rated.rating for rated in batch])
        advantages_S = (ratings_S - ratings_S.mean()) / (ratings_S.std() + 1e-4)
        lengths = torch.tensor([len(rated.response) for rated in batch])
        advantages_R = advantages_S.repeat_interleave(lengths)
        new_R = self._model([each.prompt for each in batch], [each.response for each in batch])
        ratio_R = (new_R - old_R).exp()  # 1 for answers of the present weights
        self._optimizer.zero_grad()
        (-ratio_R.clamp(max=MAX_RATIO) * advantages_R).mean().backward()
        self._optimizer.step()
        post(self._url, "/start_weight_update", {})
        for name, tensor in self._model.state_dict().items():  # a body is at most 16 MiB
            post(self._url, "/update_weights/chunk", save({name: tensor}))
        post(self._url, "/finish_weight_update", {"weights_version": version})


def run(arguments: argparse.Namespace) -> list[float]:
    """Learn from some batches; return the mean rating of each."""
    learner = Learner(arguments.url, arguments.model, arguments.dtype)
    users, curve = Users(arguments.url, arguments.users, arguments.consent), list[float]()
    try:
        for number in range(1, arguments.batches + 1):
            batch = [users.shared.get(timeout=600) for _ in range(arguments.size)]
            curve.append(sum(rated.rating for rated in batch) / len(batch))
            before = users.num_answered
            learner.learn(batch, version := f"feedback-{number}")
            num = users.num_answered - before
            print(f"{version}: mean rating {curve[-1]:.2f}, {num} answers during the update")
    finally:
        users.leave()
    return curve


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Learn from ratings while a server answers.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo", help="the server's model at its start")
    parser.add_argument("--dtype", default="bfloat16", help="the server's data type")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--consent", type=float, default=0.5, help="share of shared ratings")
    parser.add_argument("--batches", type=int, default=20, help="number of updates")
    parser.add_argument("--size", type=int, default=48, help="ratings per update")
    found = parser.parse_args(given)
    if not 0 < found.consent <= 1 or not 2 <= found.size <= MAX_SHARED:
        parser.error(f"--consent is above 0 and up to 1, --size from 2 to {MAX_SHARED}.")
    return found


if __name__ == "__main__":
    run(parse())
