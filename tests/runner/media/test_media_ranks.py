"""Media of models that several ranks compute: one process gives equal answers.

The first stage encodes and inserts the features; the other stages only need the positions. Ranks
that share layers all encode. Plans are serialised as between processes.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.base.plan import Plan
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.ranks.messages import Step, rank_codec
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import ModelSource, resolve_model
from quire.models.parts.layers import ParamFactory
from quire.models.registry import make_model
from quire.models.vision.encoder_size import encoder_size
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from quire.spec.model_spec import load_spec
from tests.runner.media.test_media_steps import check
from tests.support.engine.stages import StagesExecutor, build_stages
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.media_engine import (
    ITEMS,
    SETTINGS,
    Engine,
    FakeTower,
    VisionLlama,
    vision_models,
)


class LazyResult:
    """A result that is computed when it is requested."""

    def __init__(self, make: Any) -> None:
        self.end = make


class StagedEngine(Engine):
    """An engine of several stages."""

    def build(self, config: EngineConfig, source: ModelSource) -> BuiltRunner:
        num = config.parallel.pipeline_parallel_size
        self.executor = StagesExecutor(build_stages(config, source, num))
        return self.executor.stages[-1]

    def launch(self, plan: Plan) -> Any:
        self.executor.submit(as_received(plan))
        return LazyResult(self.executor.next_result)


def as_received(plan: Plan) -> Plan:
    """Return the plan as a rank receives it."""
    (body,) = (
        rank_codec()
        .frames()
        .feed(rank_codec().encode(Step(0, plan, is_first=True, has_masks=False)))
    )
    found = rank_codec().decode(body)
    assert isinstance(found, Step)
    return found.plan


@pytest.mark.parametrize("depth", [1, 3])
def test_two_stages_give_the_answers_of_one_process(depth: int) -> None:
    engine = StagedEngine(pipeline_parallel_size=2, pipeline_depth=depth)
    for name in ITEMS:
        engine.add(name)
    check(engine, engine.drive(depth))
    first, last = engine.executor.stages
    assert first.spec.encoder is not None and last.spec.encoder is None


def test_two_tensor_parallel_ranks_give_the_tokens_of_one() -> None:
    alone, plans, expected = Engine(), list[Plan](), list[list[list[int]]]()

    def noting(plan: Plan) -> Any:
        launched = alone.runner.launch(plan)
        plans.append(as_received(plan))
        expected.append(launched.end().token_ids.tolist())
        return launched

    alone.launch = noting  # type: ignore[method-assign]
    for name in ITEMS:
        alone.add(name)
    alone.drive()
    path = str(checkpoint("llama"))
    config = config_from_flat(model=path, tensor_parallel_size=2, **SETTINGS)

    def work(group: RankGroup) -> list[list[list[int]]]:
        built = build_runner(config, resolve_model(path, None), shard=RankPlace(group))
        return [built.run(plan).token_ids.tolist() for plan in plans]

    with vision_models():
        assert run_ranks(2, work) == [expected, expected]


@pytest.mark.parametrize(
    ("num_features", "stages"), [(0, [0]), (1, [0]), (3, [0, 1]), (9, [0, 1, 2])]
)
def test_stages_whose_layers_read_features_encode(num_features: int, stages: list[int]) -> None:
    """Each of three stages has two of the six layers."""
    spec = replace(load_spec(checkpoint("llama")), num_layers=6)
    factory = ParamFactory(torch.float32, torch.device("meta"))
    model = VisionLlama(spec, factory)
    model.vision = FakeTower(spec.hidden_size * (1 + num_features), factory)
    places = [RankPlace(stage=stage, num_stages=3) for stage in range(3)]
    found = [encoder_size(model, spec, place) for place in places]
    assert [stage for stage, each in enumerate(found) if each is not None] == stages
    assert found[0] == model.vision.size


def test_models_without_a_tower_have_no_encoder() -> None:
    spec = load_spec(checkpoint("llama"))
    text = make_model(spec, torch.float32, torch.device("meta"))
    for model in (text, torch.nn.Identity()):  # a model of another package
        assert encoder_size(model, spec, RankPlace()) is None
