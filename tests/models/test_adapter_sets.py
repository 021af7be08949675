"""A weighted set of adapters gives the logits of a model with all of them merged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_files import PREFIX, WEIGHTS, adapter_digest
from quire.models.checkpoint.adapter_sets import Member, digest_of, members_of, set_of
from quire.models.load.adapters import AdaptedModel
from quire.models.load.loading import load_model
from quire.ops.host.native import core
from quire.spec.adapter_config import CONFIG
from quire.tools.verify.paged import CPU, Paging, run_paged
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.runner.adapters import merge, to_gguf, write_adapter

A, B = Member("a", "/a", 1.0), Member("b", "/b", 0.5)


def write_three(folder: Path, adapted: AdaptedModel, base: Path) -> list[Member]:
    """Write adapters of different ranks, modules and formats; return them with scales."""
    shapes = {name: place.shape for name, place in adapted.places.items()}
    queries = {name: shape for name, shape in shapes.items() if "q_proj" in name}
    config = json.loads((base / "config.json").read_text())
    paths = [
        write_adapter(folder / "0", shapes, 4, seed=1),
        to_gguf(write_adapter(folder / "1", shapes, 7, seed=2), folder / "1.gguf", config),
        write_adapter(folder / "2", queries, 3, seed=3, use_rslora=True),
    ]
    scales = 0.5, -1.25, 3.0
    return [
        Member(adapter_digest(path), str(path), scale)
        for path, scale in zip(paths, scales, strict=True)
    ]


def merge_all(base: Path, members: list[Member], folder: Path) -> Path:
    """Return the base model with all members merged into it, one after the other."""
    for number, member in enumerate(members):
        source = Path(member.path)
        source = source.with_suffix("") if source.suffix == ".gguf" else source
        scaled = folder / f"scaled{number}"
        scaled.mkdir()
        (scaled / CONFIG).write_text((source / CONFIG).read_text())
        tensors = {name: each.double() for name, each in load_file(source / WEIGHTS).items()}
        for name, each in tensors.items():
            each *= member.scale if name.endswith("lora_B.weight") else 1.0
            assert name.startswith(PREFIX)
        save_file(tensors, scaled / WEIGHTS)
        base = merge(base, scaled, folder / f"merged{number}")
    return base


def test_a_set_gives_the_logits_of_the_merged_model(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    model = load_model(made.directory, made.spec, torch.float64, CPU)
    adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float64)
    members = write_three(tmp_path, adapted, made.directory)
    found = set_of(members)
    assert found is not None and digest_of(found[1]) == found[0]
    with pytest.raises(ModelError, match="3 adapters add up to 14, but max_lora_rank is 13"):
        adapted.load(found[1], 13)
    adapted.slots.put(0, adapted.load(found[1], 14))
    adapted.slots.begin_step([(0, range(12))])
    tokens, paging = random_tokens(12), Paging(dtype=torch.float64)
    [sum_TV] = run_paged(model, made.spec, tokens, [[12]], paging)
    merged = load_model(merge_all(made.directory, members, tmp_path), made.spec, torch.float64, CPU)
    [wanted_TV] = run_paged(merged, made.spec, tokens, [[12]], paging)
    assert (sum_TV - wanted_TV).abs().max() <= 1e-10 * wanted_TV.abs().max()


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_the_core_matches_float64_for_a_set(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    tokens, logits = random_tokens(10), []
    path = ""
    for dtype, native in ((torch.float64, False), (torch.float32, True)):
        model = load_model(made.directory, made.spec, dtype, CPU)
        adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), dtype)
        if not path:
            found = set_of(write_three(tmp_path, adapted, made.directory))
            assert found is not None
            path = found[1]
        adapted.slots.put(0, adapted.load(path, 14))
        paging = Paging(dtype=dtype, backend="cpu" if native else "torch", native=native)
        use = lambda lens, slots=adapted.slots: slots.begin_step([(0, range(lens[0]))])  # noqa: E731
        logits += run_paged(model, made.spec, tokens, [[10]], paging, use)
    torch.testing.assert_close(logits[1].double(), logits[0], rtol=1e-4, atol=1e-4)


def test_the_id_depends_only_on_the_weighted_sum() -> None:
    both = set_of([A, B])
    assert both is not None and both == set_of([B, A])
    assert both == set_of([B, A._replace(scale=0.25), A._replace(scale=0.75)])
    others = set_of([A, B._replace(scale=0.25)]), set_of([A, B._replace(id="c")]), set_of([B])
    assert len({each[0] for each in (both, *others) if each}) == 4
    assert set_of([A, B._replace(scale=0.0)]) == ("a", "/a")
    assert set_of([A._replace(scale=0.0)]) is None is set_of([A, A._replace(scale=-1.0)])


@pytest.mark.parametrize("path", ["[", "[]", '[["/a"]]', '[["/a", "x"]]', "[1]", f"[{'[' * 9999}"])
def test_invalid_set_paths_are_refused(path: str) -> None:
    with pytest.raises(ModelError):
        members_of(path)


def test_a_changed_member_changes_the_id(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", {"layer": (4, 4)})
    found = set_of([Member(adapter_digest(directory), str(directory), 2.0)])
    assert found is not None and digest_of(found[1]) == found[0]
    write_adapter(directory, {"layer": (4, 4)}, seed=1)
    assert digest_of(found[1]) != found[0]
