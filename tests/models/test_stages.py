"""Pipeline stages, each with some of the layers and its own memory, compared with the whole model.
Covers `models/families/opt.py`, which is no `Decoder`, too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, ModelError
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.load.assembly import empty_model
from quire.models.load.loading import LoadOptions, load_model
from quire.models.model import Model
from quire.ops.attention.select import make_backend
from quire.runner.native_model import NativeModel, native_or_same
from quire.spec.cache_group import STATE
from quire.spec.cuts import layers_of_stage
from quire.spec.model_spec import ModelSpec, load_spec
from tests.support.models.checkpoints import VARIANTS, random_tokens, write_checkpoint
from tests.support.models.gguf_writer import convert
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step
from tests.support.models.quick import KINDS

FLOAT = torch.float32
BLOCK, CUTS = 4, (0, 13, 14, 23)  # tokens of a block, and where the steps of a sequence begin
TOKENS = random_tokens(CUTS[-1])[0]


def stage_of(
    path: Path, spec: ModelSpec, stage: int, num_stages: int, dtype: torch.dtype = FLOAT
) -> Model:
    options = LoadOptions(place=RankPlace(stage=stage, num_stages=num_stages))
    return load_model(path, spec.of_stage(stage, num_stages), dtype, CPU, options)


def logits_by(
    models: list[Model], spec: ModelSpec, backend: str, dtype: torch.dtype = FLOAT
) -> torch.Tensor:
    """Return the logits [T, V] of a sequence that passes through the stages in several steps."""
    num = len(models)
    specs = [spec.of_stage(stage, num) for stage in range(num)]
    backends = [make_backend(backend, make_layout(each, 9, BLOCK, dtype)) for each in specs]
    runs: list[Any] = [native_or_same(*pair) for pair in zip(models, backends, strict=True)]
    assert all(isinstance(run, NativeModel) for run in runs) == (backend == "cpu")
    blocks, found = [5, 2, 8, 0, 3, 7], []
    with torch.inference_mode():
        for start, end in zip(CUTS, CUTS[1:], strict=False):
            ends = {(token - 1) // BLOCK for token in (start, end)}
            tables = tuple(
                [b if g.kind != STATE or i in ends else -1 for i, b in enumerate(blocks)]
                for g in spec.cache_groups
            )
            step = make_step([RowPart(start, end, tables)], BLOCK)
            x, ids = None, torch.tensor(TOKENS[start:end])
            for run, each in zip(runs, backends, strict=True):
                each.prepare(step)
                given = {} if x is None else {"intermediate_TE": x}
                x = run(ids, step.positions_T, each, **given)
            found.append(runs[-1].logits(x))
    return torch.cat(found)


def variants_and_backends() -> list[Any]:
    """Return variants, backends, and whether there are two stages. Quick are torch in 2 stages and
    the core in one stage per layer, or the other way round, for one variant of each kind."""
    representatives = KINDS
    return [
        pytest.param(
            name,
            backend,
            in_two,
            marks=[] if name in representatives and in_two == (v % 2 == b) else pytest.mark.slow,
        )
        for v, name in enumerate(VARIANTS)
        for b, backend in enumerate(("torch", "cpu"))
        for in_two in (True, False)
    ]


@pytest.mark.parametrize(("variant", "backend", "in_two"), variants_and_backends())
def test_stages_have_the_bits_of_the_whole_model(
    variant: str, backend: str, in_two: bool, tmp_path: Path
) -> None:
    """In float64, and in the core's programs. With one stage per layer, some groups are empty."""
    spec = write_checkpoint(tmp_path, variant).spec
    dtype = torch.float64 if backend == "torch" else FLOAT
    num = 2 if in_two else spec.num_layers
    whole = load_model(tmp_path, spec, dtype, CPU)
    stages = [stage_of(tmp_path, spec, stage, num, dtype) for stage in range(num)]
    wanted = logits_by([whole], spec, backend, dtype)
    assert torch.equal(logits_by(stages, spec, backend, dtype), wanted)


@pytest.mark.parametrize("variant", ["llama_tied", "gpt2", "opt_350m", "qwen3_next", "mixtral"])
def test_dummy_weights_of_stages_match_the_whole_model(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec

    def made(place: RankPlace) -> Model:
        return load_model(tmp_path, spec, torch.float64, CPU, LoadOptions("dummy", 3, place=place))

    stages = [made(RankPlace(stage=stage, num_stages=2)) for stage in (0, 1)]
    wanted = logits_by([made(RankPlace())], spec, "torch", torch.float64)
    assert wanted.std() > 0
    assert torch.equal(logits_by(stages, spec, "torch", torch.float64), wanted)


def test_layers_are_divided_evenly_and_the_last_stage_has_fewest() -> None:
    for num_layers in range(1, 12):
        for num in range(1, num_layers + 1):
            parts = [layers_of_stage(num_layers, stage, num) for stage in range(num)]
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            assert len(parts[-1]) == min(map(len, parts)) >= max(map(len, parts)) - 1
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the model's 3"):
        layers_of_stage(3, 0, 4)


@pytest.mark.parametrize("variant", ["llama_tied", "qwen3", "gpt2", "opt_350m", "gpt_neox"])
def test_a_stage_has_only_its_own_parts(variant: str, tmp_path: Path) -> None:
    """A tied table is on the last stage, too."""
    spec = write_checkpoint(tmp_path, variant).spec
    stages = [
        empty_model(spec, FLOAT, CPU, RankPlace(stage=stage, num_stages=2)) for stage in (0, 1)
    ]
    whole = empty_model(spec, FLOAT, CPU)
    table = whole.embedding.weight.numel() if spec.tie_embeddings else 0
    first, last, both = (sum(p.numel() for p in each.parameters()) for each in (*stages, whole))
    assert first + last == both + table
    specs = [spec.of_stage(stage, 2) for stage in (0, 1)]
    assert sum(each.kv_bytes_per_token(4) for each in specs) == spec.kv_bytes_per_token(4)
    assert {len(each.cache_groups) for each in specs} == {len(spec.cache_groups)}


def test_each_tensor_is_checked_by_one_stage(tmp_path: Path) -> None:
    """The stage of the layer reports an unknown or missing tensor. The other stage loads."""
    spec = write_checkpoint(tmp_path, "llama").spec
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = "model.layers.2.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != gone}, file, {"format": "pt"})
    stage_of(tmp_path, spec, 0, 2)
    with pytest.raises(ModelError, match=gone):
        stage_of(tmp_path, spec, 1, 2)
    save_file(tensors | {"model.layers.0.odd": torch.zeros(1)}, file, {"format": "pt"})
    stage_of(tmp_path, spec, 1, 2)
    with pytest.raises(ModelError, match="odd"):
        stage_of(tmp_path, spec, 0, 2)


@pytest.mark.parametrize("variant", ["llama", "qwen3_next", "gpt2"])
def test_stages_of_a_gguf_file_match_the_whole_model(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    path = convert(checkpoint.directory, tmp_path / "model.gguf")
    spec = load_spec(path)
    wanted = logits_by([load_model(path, spec, FLOAT, CPU)], spec, "cpu")
    stages = [stage_of(path, spec, stage, 2) for stage in range(2)]
    assert torch.equal(logits_by(stages, spec, "cpu"), wanted)
