"""`TrainingModel`: gradients against transformers', parameters, and what it refuses.

Covers `training/gradients.py`.
"""

import copy
import gc
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from quire.base.errors import ConfigError, ModelError, RequestError
from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.ops.host.native import core
from quire.training import Samples, TrainingModel
from quire.training.gradients import Recipe
from tests.support.models.reference_checkpoints import checkpoint

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

NUMBERS = random.Random(5)
LENGTHS = [(1, 3), (4, 0), (30, 20), (2, 61), (9, 9)]  # longer and shorter than mistral's window
PROMPTS, RESPONSES = (
    [NUMBERS.choices(range(97), k=lengths[part]) for lengths in LENGTHS] for part in (0, 1)
)
FACTORS = torch.randn(sum(map(len, RESPONSES)), generator=torch.Generator().manual_seed(3))


def reference_logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Return transformers' log-probabilities, one sequence at a time."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([*prompt, *response])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        chosen = ids[len(prompt) :, None]
        found.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_gradients_match_transformers(architecture: str) -> None:
    path = checkpoint(architecture)
    model, other = TrainingModel(str(path), dtype="float32"), reference(path)
    ours, wanted = model(PROMPTS, RESPONSES), reference_logprobs(other)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-4)
    (ours * FACTORS).sum().backward()
    (wanted * FACTORS).sum().backward()
    names = dict(other.named_parameters())
    assert names.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert distance(parameter, names[name]) < 1e-4, name


def reference(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64
    )
    return model


def distance(ours: torch.nn.Parameter, other: torch.nn.Parameter) -> float:
    """Return the relative distance of two gradients."""
    assert ours.grad is not None and other.grad is not None
    return float((ours.grad - other.grad).norm() / other.grad.norm())


def test_bfloat16_gradients_match_float32_at_rounded_weights() -> None:
    """They differ by the rounding of activations only."""
    path = checkpoint("qwen3")
    model, other = TrainingModel(str(path), dtype="bfloat16"), reference(path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.bfloat16())
    (model(PROMPTS, RESPONSES) * FACTORS).sum().backward()
    (reference_logprobs(other) * FACTORS).sum().backward()
    names = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and distance(parameter, names[name]) < 0.05, name


def test_gradients_match_finite_differences() -> None:
    model = TrainingModel(str(checkpoint("llama")), dtype="float32")
    (model(PROMPTS, RESPONSES) * FACTORS).sum().backward()
    step = 1e-2
    for parameter in list(model.parameters())[::4]:
        assert parameter.grad is not None
        direction = parameter.grad.sign()
        slope, ends = float((parameter.grad * direction).sum()), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction / direction.numel()
                ends.append(float((model(PROMPTS, RESPONSES) * FACTORS).double().sum()))
                parameter -= sign * step * direction / direction.numel()
        assert (ends[0] - ends[1]) / (2 * step) * direction.numel() == pytest.approx(slope, 0.05)


def test_parameters_have_the_checkpoints_names_and_values(tmp_path: Path) -> None:
    """Also for a checkpoint of the bare decoder, and for a tied head."""
    tied = TrainingModel("demo", dtype="bfloat16").state_dict()
    assert "lm_head.weight" not in tied and "model.layers.5.mlp.up_proj.weight" in tied
    path = checkpoint("llama")
    stored = reference(path).state_dict()
    found = TrainingModel(str(path)).state_dict()
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name].double(), stored[name]) for name in stored)


def test_changed_parameters_change_the_next_forward_pass() -> None:
    model = TrainingModel(str(checkpoint("llama")), dtype="float32")
    with torch.no_grad():
        before = model(PROMPTS, RESPONSES)
        assert torch.equal(model(PROMPTS, RESPONSES), before)
        first = next(model.parameters())
        first += 0.1
        assert not torch.equal(model(PROMPTS, RESPONSES), before)
        model.load_state_dict(TrainingModel(str(checkpoint("llama"))).state_dict())
        assert torch.equal(model(PROMPTS, RESPONSES), before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    (model(PROMPTS, RESPONSES) * FACTORS).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(model(PROMPTS, RESPONSES), before)


def test_unsupported_models_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gpt2.*llama, mistral, qwen2, qwen3, qwen3_moe"):
        TrainingModel(str(checkpoint("gpt2")))
    with pytest.raises(ConfigError, match="device is cuda"):
        TrainingModel("demo", device="cuda")
    with pytest.raises(ConfigError, match="dtype must be one of"):
        TrainingModel("demo", dtype="float64")
    shutil.copytree(checkpoint("llama"), tmp_path / "gelu")
    raw = json.loads((tmp_path / "gelu" / "config.json").read_text()) | {"hidden_act": "gelu"}
    (tmp_path / "gelu" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="activation gelu"):
        TrainingModel(str(tmp_path / "gelu"))
    moved = TrainingModel(str(checkpoint("llama"))).double()
    with pytest.raises(ConfigError, match="float32 on the CPU"):
        moved(PROMPTS, RESPONSES)


@pytest.mark.parametrize(
    ("prompts", "responses", "message"),
    [
        ([[1]], [], "1 prompts and 0 responses"),
        ([], [], "0 prompts"),
        ([[1], [2]], [[], []], "at least one token in all"),
        ([[]], [[1]], "0 prompt tokens"),
        ([[1] * 100], [[1] * 29], "129 tokens"),
        ([[1]], [[97]], "from 0 to 96"),
        ([[-1]], [[3]], "from 0 to 96"),
    ],
)
def test_invalid_samples_are_refused(
    prompts: list[list[int]], responses: list[list[int]], message: str
) -> None:
    model = TrainingModel(str(checkpoint("llama")))
    with pytest.raises(RequestError, match=message):
        model(prompts, responses)


def test_samples_need_logprobs() -> None:
    output = RequestOutput("7", None, [1, 2], None, [CompletionOutput(0, "", [3])])
    with pytest.raises(RequestError, match="request 7 .* logprobs=0"):
        Samples.of([output])


def test_a_forward_pass_leaks_no_activations() -> None:
    """A result in a reference cycle would keep the activations of each step in memory."""
    model = TrainingModel("demo", dtype="float32")
    gc.collect()
    gc.disable()
    try:
        model([[1, 2, 3]], [[4, 5]]).sum().backward()
        assert not [each for each in gc.get_objects() if isinstance(each, Recipe)]
    finally:
        gc.enable()


def test_a_deep_copy_computes_the_same_logprobs() -> None:
    model = TrainingModel("demo", dtype="bfloat16")
    found = model([[1, 2, 3]], [[4, 5]])
    assert torch.equal(copy.deepcopy(model)([[1, 2, 3]], [[4, 5]]), found)
