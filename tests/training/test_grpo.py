"""examples/grpo.py as its user runs it, with few steps."""

from pathlib import Path

import pytest
import torch

from benchmarks.models.grpo import EXAMPLES, WINDOW, draw, example, learn, mean_reward
from quire.ops.host.native import core

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

SCRIPT = EXAMPLES / "grpo.py"
STORY = "There was a cat. It sat. It ate. It slept. It was a good day."


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) <= 150


def test_rewards_advantages_and_kl_have_the_defined_values() -> None:
    grpo = example("grpo")
    assert grpo.reward(STORY, "cat", True) == 1.0
    assert grpo.reward(STORY + " The end.", "cat", True) == pytest.approx(0.8)
    assert grpo.reward(STORY, "dog", True) == grpo.reward(STORY, "cat", False) == 0.0
    advantages = grpo.advantages_of(torch.tensor([[1.0, 0.0, 0.5], [0.2, 0.2, 0.2]]))
    torch.testing.assert_close(advantages[0], torch.tensor([1.0, -1.0, 0.0]), atol=1e-3, rtol=0)
    assert not advantages[1].any()
    assert float(grpo.k3(torch.tensor([-1.0]), torch.tensor([-1.0]))) == 0.0
    assert float(grpo.k3(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))) > 0.5


def test_the_reward_curve_is_drawn_from_rows(tmp_path: Path) -> None:
    rows = [{"batch": n, "reward": 0.1 * n, "best_share": 0.05 * n} for n in range(1, 8)]
    assert mean_reward(rows, -WINDOW) == pytest.approx(0.5)
    pytest.importorskip("matplotlib")
    draw(rows, tmp_path / "grpo.svg")
    assert "mean reward" in (tmp_path / "grpo.svg").read_text("utf-8")


@pytest.mark.slow
def test_the_model_learns_the_rule() -> None:
    """The KL is exactly 0 before the first update of each batch. The reward rises above that of the
    first batches, which measure the untrained model. How far depends on the instruction set."""
    _, rows = learn(["--steps", "16"])
    assert len(rows) == 16 and all(row["kl_before"] == 0.0 < row["kl_after"] for row in rows)
    assert mean_reward(rows, 0, 2) < 0.5
    assert mean_reward(rows, -4) > mean_reward(rows, 0, 2) + 0.05
