"""Every field of every architecture's config has the same effect here as in transformers, or is
refused by its name.

Each case changes one field of a tiny checkpoint's config to another value of its type, and runs
both in float64. A change may have no effect in either. Changes that transformers refuses are
skipped.
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
CLOSE = 1e-9  # relative to the largest logit
MIN_CASES = 60  # of a variant
QUICK = "qwen2"  # the variant of `make test`
QUICK_STEP = 5  # `make test` runs every fifth change
SIZES = ("hidden_size", "vocab_size", "intermediate_size")  # their defaults make large models
WEIGHTS = "model.safetensors"
# Other names that a refusal may give: an alias of the field, or the field it is compared with.
ALSO_CALLED = {
    "rope_scaling": ("rope_parameters", "original_max_position_embeddings"),
    "num_local_experts": ("num_experts",),
    "num_experts": ("num_local_experts",),
    "use_sliding_window": ("sliding_window",),
}


@dataclass(frozen=True)
class Ours:
    """quire's result for a config: logits [T, V], or a refusal."""

    logits: torch.Tensor | None = None
    refusal: str = ""


def base_config(variant: str) -> dict[str, Any]:
    """Return a variant's whole config, as transformers writes it."""
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
    """Return transformers' model of a folder's config in float64. A weight's values depend only on
    its name and shape."""
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
    """Return transformers' logits, and save its weights in the folder; None if it refuses the
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


def their_logits_with_stored_weights(folder: Path) -> torch.Tensor | str | None:
    """Return transformers' logits with the weights in the folder, or a text that lists missing and
    unused weights. Return None if it refuses the config or fails."""
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


def problem_with_stored_weights(folder: Path) -> str | None:
    """Return what is wrong when the config was changed but not the weights; None if nothing is."""
    wanted = their_logits_with_stored_weights(folder)
    if wanted is None:
        return None
    got = ours(folder)
    if got.logits is None:
        return None
    if isinstance(wanted, str):
        return f"is accepted, though transformers reports {wanted}"
    return difference(got.logits, wanted)


def names_in(change: Change) -> Iterator[str]:
    """Yield the names by which a refusal may refer to a change."""
    for name, value in change.items():
        yield from (name, *ALSO_CALLED.get(name, ()))
        if isinstance(value, dict):
            yield from names_in(value)


def problem(folder: Path, base: dict[str, Any], change: Change) -> str | None:
    """Return what is wrong with the result for a changed config; None if nothing is."""
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
    """Return variants, and the step between their tested changes. Slow cases test all changes."""
    all_of = [pytest.param(name, 1, marks=pytest.mark.slow) for name in sorted(names)]
    return [pytest.param(QUICK, QUICK_STEP), *all_of]


def chosen(all_changes: list[Change], step: int) -> list[Change]:
    """Return every step-th change. A step above 1 leaves out models that take seconds to fill."""
    return [
        change
        for change in all_changes[::step]
        if step == 1 or not any(change.get(size) is ABSENT for size in SIZES)
    ]


def test_each_architecture_is_covered() -> None:
    assert {VARIANTS[name][0] for name in first_of_each_type()} == set(MODELS)


@pytest.mark.parametrize(("variant", "step"), quick_or_slow(VARIANTS))
def test_each_field_matches_transformers_or_is_refused(
    variant: str, step: int, tmp_path: Path
) -> None:
    base = base_config(variant)
    assert problem(tmp_path / "base", base, {}) is None
    assert ours(tmp_path / "base").logits is not None
    tested = list(changes(VARIANTS[variant][0], base))
    assert len(tested) > MIN_CASES
    tested += ropes(base) if variant in first_of_each_type() else []
    check_all(tmp_path, chosen(tested, step), lambda folder, change: problem(folder, base, change))


@pytest.mark.parametrize(("variant", "step"), quick_or_slow(first_of_each_type()))
def test_weights_that_contradict_the_config_are_refused(
    variant: str, step: int, tmp_path: Path
) -> None:
    """Only the config changes. quire refuses it where transformers would initialise or ignore
    weights. Otherwise the logits are equal."""
    base, stored = base_config(variant), tmp_path / "stored"
    assert theirs(write_config(stored, base)) is not None

    def problem_of_config(folder: Path, change: Change) -> str | None:
        write_config(folder, changed(base, change))
        (folder / WEIGHTS).hardlink_to(stored / WEIGHTS)
        return problem_with_stored_weights(folder)

    check_all(tmp_path, chosen(list(changes(VARIANTS[variant][0], base)), step), problem_of_config)


def check_all(
    where: Path, tested: Iterable[Change], problem_of: Callable[[Path, Change], str | None]
) -> None:
    problems = []
    for number, change in enumerate(tested):
        folder = where / str(number)
        found = problem_of(folder, change)
        if found is not None:
            problems.append(f"{change}: {found}")
        shutil.rmtree(folder)
    assert not problems, "\n" + "\n".join(problems)
