"""examples/learn_from_feedback.py with a real server."""

import io
import json
import math
import re
import time
import urllib.error
from typing import Any

import pytest
import torch

from benchmarks.models.grpo import EXAMPLES, example
from quire.ops.host.native import core
from tests.support.processes.servers import Server

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

SCRIPT = EXAMPLES / "learn_from_feedback.py"


def test_the_script_is_short_and_rates_by_sentence_count() -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) <= 150
    found = example("learn_from_feedback")
    assert found.rating_of("One. Two. Three. Four! Five?") == 1.0
    assert found.rating_of("One. Two.") == pytest.approx(0.4)
    with pytest.raises(SystemExit):
        found.parse(["--consent", "0"])


def test_ratios_above_the_limit_still_have_gradients() -> None:
    """The gradient of a log-probability is its advantage times its ratio, 2 at most."""
    new_R = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old_R = torch.tensor([-1.0, -4.0, -1.0 + math.log(2)])
    loss = example("learn_from_feedback").loss_of(new_R, old_R, torch.tensor([1.0, 1.0, -1.0]))
    loss.backward()
    assert new_R.grad is not None
    torch.testing.assert_close(-3 * new_R.grad, torch.tensor([1.0, 2.0, -0.5]))


def answer_of(request: Any, timeout: float) -> io.BytesIO:
    """Return a server's response of one token."""
    logprobs = {"content": [{"logprob": -1.0}]}
    choice = {"message": {"content": "A."}, "logprobs": logprobs, "token_ids": [5]}
    return io.BytesIO(json.dumps({"prompt_token_ids": [1], "choices": [choice]}).encode())


def test_users_never_wait_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratings beyond MAX_SHARED are dropped, but all answers are counted."""
    found = example("learn_from_feedback")
    monkeypatch.setattr(found, "MAX_SHARED", 3)
    monkeypatch.setattr("urllib.request.urlopen", answer_of)
    users = found.Users("http://server", 4, 1.0)
    limit_s = time.monotonic() + 60
    while min(users.num_answered) < 5:
        assert time.monotonic() < limit_s, "a user waits"
    batch = users.batch(8)
    users.ended.set()
    users.pool.shutdown()
    assert batch == [found.Rated([1], [5], [-1.0], pytest.approx(0.2))] * 8


def test_an_error_in_a_user_thread_ends_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    found = example("learn_from_feedback")

    def refuse(request: Any, timeout: float) -> io.BytesIO:
        raise urllib.error.HTTPError(request.full_url, 503, "overloaded", {}, None)  # type: ignore

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(urllib.error.HTTPError, match="overloaded"):
        found.run(found.parse(["--url", "http://server", "--users", "2"]))


@pytest.mark.slow
def test_a_server_answers_during_weight_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """Users get answers during updates. An answer names the versions of its weights."""
    found = example("learn_from_feedback")
    server = Server("demo", "--dtype", "bfloat16")
    try:
        given = ["--url", server.url, "--users", "4", "--batches", "2", "--size", "6"]
        curve = found.run(found.parse([*given, "--consent", "1"]))
        reply = found.post(server.url, "/v1/completions", {"prompt": "A", "max_tokens": 2})
    finally:
        server.stop()
    lines = capsys.readouterr().out.splitlines()
    assert sum(int(re.findall(r"(\d+) answers", line)[0]) for line in lines) > 0
    assert len(curve) == len(lines) == 2 and lines[1].startswith("feedback-2: ")
    assert reply["choices"][0]["weights_versions"][-1]["version"] == "feedback-2"
