"""Learn from the ratings of users while a server answers them.

    quire serve demo --dtype bfloat16 --port 8000
    python examples/learn_from_feedback.py --url http://127.0.0.1:8000

Users ask for stories and rate them. This script plays the users, with a rule for ratings. With
consent, the script keeps token ids, log-probabilities and the rating until the next update. Rated
answers become a batch of policy gradient (docs/use/training-model.md). The server never pauses.
"""

import argparse
import contextlib
import json
import queue
import random
import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from quire.training import TrainingModel

HEROES = ("cat", "dog", "bird", "fish", "frog", "mouse", "horse", "fox", "bear", "rabbit")
LR, MAX_RATIO, MAX_SHARED = 3e-4, 2.0, 1000  # more than MAX_SHARED waiting ratings are dropped


class Rated(NamedTuple):
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


def loss_of(new_R: torch.Tensor, old_R: torch.Tensor, advantages_R: torch.Tensor) -> torch.Tensor:
    """Return the loss of truncated importance sampling: ratios only weigh the gradients."""
    ratio_R = (new_R.detach() - old_R).exp()  # 1 for answers of the present weights
    return -(ratio_R.clamp(max=MAX_RATIO) * advantages_R * new_R).mean()


def rating_of(story: str) -> float:
    """Return how much a user likes a story, from 0 to 1: these users like five sentences."""
    return max(0.0, 1.0 - abs(len(re.findall(r"[.!?]", story)) - 5) / 5)


class Users:
    """Threads that ask for stories, and share some ratings. num_answered: answers by user."""

    def __init__(self, url: str, num_users: int, consent: float) -> None:
        self.num_answered = [0] * num_users
        self._shared: queue.Queue[Rated] = queue.Queue(MAX_SHARED)
        self._url, self._consent, self.ended = url, consent, threading.Event()
        self.pool = ThreadPoolExecutor(num_users)
        self._users = [self.pool.submit(self._ask, number) for number in range(num_users)]

    def batch(self, size: int) -> list[Rated]:
        """Wait for shared ratings. Raises the error that ended a user."""
        found = list[Rated]()
        while len(found) < size:
            _ = [user.result() for user in self._users if user.done()]
            with contextlib.suppress(queue.Empty):
                found.append(self._shared.get(timeout=0.5))
        return found

    def _ask(self, number: int) -> None:
        numbers = random.Random(number)
        while not self.ended.is_set():
            content = f"Tell me a short story about a {numbers.choice(HEROES)}."
            reply = post(self._url, "/v1/chat/completions", {
                "messages": [{"role": "user", "content": content}], "max_tokens": 160,
                "temperature": 1.0, "top_p": 1.0, "logprobs": True, "return_token_ids": True,
            })  # fmt: skip
            self.num_answered[number] += 1
            choice = reply["choices"][0]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            rating = rating_of(choice["message"]["content"])
            shown = Rated(reply["prompt_token_ids"], choice["token_ids"], logprobs, rating)
            if numbers.random() < self._consent:
                with contextlib.suppress(queue.Full):
                    self._shared.put_nowait(shown)


def learn(model: TrainingModel, optimizer: torch.optim.Optimizer, batch: list[Rated]) -> None:
    """Make better rated answers more likely."""
    old_R = torch.tensor([each for rated in batch for each in rated.logprobs])
    ratings_S = torch.tensor([rated.rating for rated in batch])
    advantages_S = (ratings_S - ratings_S.mean()) / (ratings_S.std() + 1e-4)
    lengths_S = torch.tensor([len(rated.response) for rated in batch])
    new_R = model([each.prompt for each in batch], [each.response for each in batch])
    optimizer.zero_grad()
    loss_of(new_R, old_R, advantages_S.repeat_interleave(lengths_S)).backward()
    optimizer.step()


def run(arguments: argparse.Namespace) -> list[float]:
    """Learn from some batches; return the mean rating of each."""
    url, model = arguments.url, TrainingModel(arguments.model, dtype=arguments.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    users, curve = Users(url, arguments.users, arguments.consent), list[float]()
    try:
        for number in range(1, arguments.batches + 1):
            batch = users.batch(arguments.size)
            curve.append(sum(rated.rating for rated in batch) / len(batch))
            before = sum(users.num_answered)
            learn(model, optimizer, batch)
            post(url, "/start_weight_update", {})
            for name, tensor in model.state_dict().items():  # a body has at most 16 MiB
                post(url, "/update_weights/chunk", save({name: tensor}))
            post(url, "/finish_weight_update", {"weights_version": f"feedback-{number}"})
            num = sum(users.num_answered) - before
            print(f"feedback-{number}: mean rating {curve[-1]:.2f}, {num} answers meanwhile")
    finally:
        users.ended.set()
        users.pool.shutdown()  # waits for the current requests
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
    if found.users < 1 or not 0 < found.consent <= 1 or not 2 <= found.size <= MAX_SHARED:
        parser.error(f"need --users 1 or more, --consent in (0, 1], --size 2 to {MAX_SHARED}.")
    return found


if __name__ == "__main__":
    run(parse())
