"""Every field of every architecture's config has the same effect here as in transformers, or is
refused by its name.

Each case changes one field of a tiny checkpoint's config to another value of its type, and runs
both in float64. A change without effect in both is right, too. Changes that transformers refuses
are skipped.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.base.errors import ConfigError, ModelError
from quire.models.load.loading import load_model
from quire.models.registry import MODELS
from quire.spec.model_spec import load_spec
from quire.tools.verify.precision import WholePrecision
from tests.support.models.checkpoints import VARIANTS
from tests.support.models.config_changes import ABSENT, Change, changes, ropes
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quick import first_of_each_type

TOKENS = [5, 17, 3, 40, 22, 9, 31, 14, 2, 44, 27, 8]  # below half of the vocabulary
CLOSE = 1e-9  # of the largest logit
FEWEST_CASES = 60  # of a variant
QUICK = "qwen2"  # what `make test` tries
QUICK_STEP = 5  # `make test` tries each fifth change
SIZES = ("hidden_size", "vocab_size", "intermediate_size")  # their defaults make large models
WEIGHTS = "model.safetensors"
# What a refusal may say in place of the field: another name of it, or what it is compared with.
ALSO_CALLED = {
    "rope_scaling": ("rope_parameters", "original_max_position_embeddings"),
    "num_local_experts": ("num_experts",),
    "num_experts": ("num_local_experts",),
    "use_sliding_window": ("sliding_window",),
}


@dataclass(frozen=True)
class Ours:
    """What came of a config here: logits [T, V], or a refusal."""

    logits: torch.Tensor | None = None
    refusal: str = ""


def base_config(variant: str) -> dict[str, Any]:
    """A variant's whole config, as transformers writes it."""
    model_type, own = VARIANTS[variant]
    config = transformers.AutoConfig.for_model(model_type, **own)
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in written.items() if not name.startswith("_")}


def changed(base: dict[str, Any], change: Change) -> dict[str, Any]:
    config = base | change
    return {name: value for name, value in config.items() if value is not ABSENT}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_theirs(folder: Path) -> Any:
    """transformers' model of a folder's config in float64. The numbers of a weight depend on its
    name and shape alone."""
    config = transformers.AutoConfig.from_pretrained(folder)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, **options)
    for name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {weight.shape}".encode()))
        is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
        weight.data.normal_(1.0 if is_norm else 0.0, 0.25, generator=generator)
    return model.eval()


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


def theirs(folder: Path) -> torch.Tensor | None:
    """Logits by transformers, whose weights are then in the folder; None if it refuses the
    config."""
    with WholePrecision():
        try:
            model = make_theirs(folder)
            logits = logits_of(model)
        except Exception:
            return None
        if not torch.isfinite(logits).all():
            return None
        model.save_pretrained(folder / "weights")
    for file in (folder / "weights").glob("model*"):
        file.replace(folder / file.name)
    shutil.rmtree(folder / "weights")
    return logits


def ours(folder: Path) -> Ours:
    try:
        spec = load_spec(folder).served_up_to(len(TOKENS))  # as transformers sees it (longrope)
        model = load_model(folder, spec, torch.float64, CPU)
    except (ModelError, ConfigError) as error:
        return Ours(refusal=str(error))
    lengths = [[len(TOKENS)]]
    options: dict[str, Any] = {"backend": "reference", "dtype": torch.float64}
    return Ours(run_paged(model, spec, [TOKENS], lengths, **options)[0])


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    error = (got - wanted).abs().max().item() / wanted.abs().max().item()
    return None if error < CLOSE else f"differs by {error:.1e}"


def their_reading(folder: Path) -> torch.Tensor | str | None:
    """Logits by transformers from the weights that are in the folder; which of them it misses or
    leaves out; None if it refuses the config or fails."""
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with WholePrecision():
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, output_loading_info=True, **options
            )
            found = {kind: keys for kind, keys in info.items() if keys}
            return str(found) if found else logits_of(model.eval())
        except Exception:
            return None


def beside_the_same_weights(folder: Path) -> str | None:
    """Say what is wrong with what is read of a folder whose config was changed, not its weights."""
    wanted = their_reading(folder)
    if wanted is None:
        return None
    got = ours(folder)
    if got.logits is None:
        return None
    if isinstance(wanted, str):
        return f"is read, though {wanted}"
    return difference(got.logits, wanted)


def names_in(change: Change) -> Iterator[str]:
    """What a refusal may call a change by."""
    for name, value in change.items():
        yield from (name, *ALSO_CALLED.get(name, ()))
        if isinstance(value, dict):
            yield from names_in(value)


def problem(folder: Path, base: dict[str, Any], change: Change) -> str | None:
    """Say what is wrong with what becomes of a change; None if nothing is."""
    wanted = theirs(write_config(folder, changed(base, change)))
    if wanted is None:
        return None
    try:
        got = ours(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if got.logits is None:
        is_named = any(name in got.refusal for name in names_in(change))
        return None if is_named else f"is refused without its name: {got.refusal}"
    return difference(got.logits, wanted)


def quick_or_slow(names: Iterable[str]) -> list[Any]:
    """Variants, and which of their changes are tried: all where there is time."""
    all_of = [pytest.param(name, 1, marks=pytest.mark.slow) for name in sorted(names)]
    return [pytest.param(QUICK, QUICK_STEP), *all_of]


def chosen(all_changes: list[Change], step: int) -> list[Change]:
    """Return each change whose number is a multiple of step. A step above 1 leaves out models that
    take seconds to fill."""
    return [
        change
        for change in all_changes[::step]
        if step == 1 or not any(change.get(size) is ABSENT for size in SIZES)
    ]


def test_each_architecture_is_tried() -> None:
    assert {VARIANTS[name][0] for name in first_of_each_type()} == set(MODELS)


@pytest.mark.parametrize(("variant", "step"), quick_or_slow(VARIANTS))
def test_each_field_is_obeyed_or_refused(variant: str, step: int, tmp_path: Path) -> None:
    base = base_config(variant)
    assert problem(tmp_path / "base", base, {}) is None
    assert ours(tmp_path / "base").logits is not None
    tried = list(changes(VARIANTS[variant][0], base))
    assert len(tried) > FEWEST_CASES
    tried += ropes(base) if variant in first_of_each_type() else []
    check_all(tmp_path, chosen(tried, step), lambda folder, change: problem(folder, base, change))


@pytest.mark.parametrize(("variant", "step"), quick_or_slow(first_of_each_type()))
def test_weights_that_do_not_fit_the_config_are_refused(
    variant: str, step: int, tmp_path: Path
) -> None:
    """The weights stay as they are. Where transformers would make up or leave out some, we refuse;
    else the numbers are the same."""
    base, stored = base_config(variant), tmp_path / "stored"
    assert theirs(write_config(stored, base)) is not None

    def beside_stored(folder: Path, change: Change) -> str | None:
        write_config(folder, changed(base, change))
        (folder / WEIGHTS).hardlink_to(stored / WEIGHTS)
        return beside_the_same_weights(folder)

    check_all(tmp_path, chosen(list(changes(VARIANTS[variant][0], base)), step), beside_stored)


def check_all(
    where: Path, tried: Iterable[Change], problem_of: Callable[[Path, Change], str | None]
) -> None:
    problems = []
    for number, change in enumerate(tried):
        folder = where / str(number)
        found = problem_of(folder, change)
        if found is not None:
            problems.append(f"{change}: {found}")
        shutil.rmtree(folder)
    assert not problems, "\n" + "\n".join(problems)
