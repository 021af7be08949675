"""examples/grpo.py as its user runs it, with few steps."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.ops.host.native import core

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"
STORY = "There was a cat. It sat. It ate. It slept. It was a good day."


def example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) <= 150


def test_rewards_and_advantages() -> None:
    grpo = example()
    assert grpo.reward(STORY, "cat", True) == 1.0
    assert grpo.reward(STORY + " The end.", "cat", True) == pytest.approx(0.8)
    assert grpo.reward(STORY, "dog", True) == grpo.reward(STORY, "cat", False) == 0.0
    advantages = grpo.advantages_of(torch.tensor([[1.0, 0.0, 0.5], [0.2, 0.2, 0.2]]))
    torch.testing.assert_close(advantages[0], torch.tensor([1.0, -1.0, 0.0]), atol=1e-3, rtol=0)
    assert not advantages[1].any()
    assert float(grpo.k3(torch.tensor([-1.0]), torch.tensor([-1.0]))) == 0.0
    assert float(grpo.k3(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))) > 0.5


@pytest.mark.slow
def test_the_kl_is_zero_before_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """`train` raises if it is not; the KL after the first of two updates is above zero."""
    grpo = example()
    given = ["--steps", "3", "--prompts", "2", "--group", "4"]
    curve = grpo.train(grpo.parse(given))
    lines = capsys.readouterr().out.splitlines()
    assert len(curve) == len(lines) == 3
    for line in lines:
        assert "KL before 0.0 " in line and "after 0.0e+00" not in line
