"""Partial updates and sparse deltas give the answers of a new engine with the resulting weights."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SparseDelta
from quire.base.errors import RequestError
from quire.models.load.patches import digest_of
from tests.engine.attachments.test_weight_updates import answers, open_llm
from tests.support.models.reference_checkpoints import changed, changed_tensors, checkpoint

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = load_file(folder / "model.safetensors")
    return found


def fresh_answers(tensors: Tensors, folder: Path, **settings: Any) -> Any:
    """Return the answers of an engine that starts with these tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint("qwen3"), folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with open_llm(folder, **settings) as fresh:
        return answers(fresh)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.slow),
    ],
    ids=["float32", "int8"],
)
def test_random_partial_updates_match_a_new_engine(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Updates mix tensors and deltas, with sleeps, failures and whole updates between them."""
    numbers = random.Random(7)
    current, other = tensors_of(checkpoint("qwen3")), changed_tensors("qwen3", 1)
    with open_llm(checkpoint("qwen3"), **settings) as llm:
        for index in range(3):
            update: dict[str, Any] = {}
            for name in numbers.sample(sorted(current), 3):
                new = current[name].clone()
                if numbers.random() < 0.5:
                    new = other[name].to(new.dtype) * (index + 1)
                    update[name] = new
                else:
                    new.view(-1)[numbers.randrange(new.numel())] += 0.5
                    update[name] = SparseDelta.between(current[name], new)
                    assert len(update[name].indices) == 1
                current[name] = new
            llm.update_weights(update, partial=True)
            if index % 2:
                llm.sleep(2)
                llm.wake_up()
            with pytest.raises(RequestError, match="it is of other weights"):
                wrong = SparseDelta(torch.tensor([0]), current[NORM][:1] + 1, "0" * 64)
                llm.update_weights({NORM: wrong}, partial=True)
        assert answers(llm) == fresh_answers(current, tmp_path / "fresh", **settings)
        llm.update_weights(changed("qwen3", 1))
        whole = tensors_of(changed("qwen3", 1))
        whole[NORM] = whole[NORM] * 2
        llm.update_weights({NORM: whole[NORM]}, partial=True)
        assert answers(llm) == fresh_answers(whole, tmp_path / "fresh", **settings)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(checkpoint("qwen3"), dtype="float32") as made:
        yield made


def delta(name: str, **changes: Any) -> dict[str, Any]:
    old = tensors_of(checkpoint("qwen3"))[name]
    return {name: SparseDelta.between(old, old + 1)._replace(**changes)}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda: {"model.other": torch.zeros(2)}, "do not hold model.other; use their names"),
        (lambda: {NORM: torch.zeros(3)}, r"has the shape \[3\]"),
        (lambda: delta(NORM, indices=torch.tensor([10**6] * 32)), "outside its 32 elements"),
        (lambda: delta(NORM, indices=torch.tensor([-1] * 32)), "outside its 32 elements"),
        (lambda: delta(NORM, indices=torch.tensor([1])), "one value for each index"),
        (lambda: delta(NORM, values=torch.zeros(32, dtype=torch.int64)), "use torch.float32"),
        (lambda: delta(NORM, sha256="x"), "it is of other weights"),
        (lambda: {NORM + ".delta_values": torch.zeros(1)}, "in one file, and the digest"),
    ],
)
def test_invalid_updates_leave_the_old_weights(llm: LLM, update: Any, message: str) -> None:
    before = answers(llm)
    with pytest.raises(RequestError, match=message):
        llm.update_weights(update(), partial=True)
    assert answers(llm) == before


def test_a_partial_update_requires_safetensors_files() -> None:
    """Weights that came as tensors have no files, and dummy weights have none."""
    part = {NORM: tensors_of(checkpoint("qwen3"))[NORM]}
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        llm.update_weights(changed_tensors("qwen3", 1))
        with pytest.raises(RequestError, match="needs the safetensors files of the present"):
            llm.update_weights(part, partial=True)
    with (
        open_llm(checkpoint("qwen3"), dtype="float32", load_format="dummy") as llm,
        pytest.raises(RequestError, match="needs the safetensors files of the present"),
    ):
        llm.update_weights(part, partial=True)


def test_deltas_compare_bits_not_numbers() -> None:
    """Zeros of different sign differ. A NaN does not differ from itself."""
    old = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    found = SparseDelta.between(old, new)
    assert found.indices.tolist() == [0] and found.sha256 == digest_of(new) != digest_of(old)
