"""How models share the memory: `serve/several/shares.py`, `needs.py`, `sizes.py`."""

import itertools

import pytest

from quire.base.errors import OutOfMemory, QuireError
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.kv.sizing import MIB
from quire.runner.memory_plan import GPU_CONTEXT_BYTES, GPU_RESERVE_BYTES
from quire.serve.several.shares import ModelNeeds, Needs, described, pool_budget, split
from quire.serve.several.sizes import min_bytes, needs_of
from tests.support.models.encoder_checkpoints import encoder_checkpoint
from tests.support.models.reference_checkpoints import text_checkpoint

NO_OWN = [None, None, None]
MODELS = [  # weights, workspace, one sequence, maximum
    ModelNeeds(8000 * MIB, 100 * MIB, 500 * MIB, 9000 * MIB),
    ModelNeeds(1000 * MIB, 50 * MIB, 100 * MIB, 2000 * MIB),
    ModelNeeds(100 * MIB, 10 * MIB, 30 * MIB, 40 * MIB),
]


def needs(device: str = "cpu", free: int = 20_000, is_bounded: bool = True) -> Needs:
    models = MODELS if is_bounded else [unbounded(each) for each in MODELS]
    return Needs(models, device, free * MIB, free * MIB)


def unbounded(each: ModelNeeds) -> ModelNeeds:
    return ModelNeeds(each.weights, each.workspace, each.one_sequence, None)


def engine(**settings: object) -> EngineConfig:
    return config_from_flat(**settings)


def test_each_pool_fits_one_sequence_and_the_rest_follows_weights() -> None:
    pools = split(needs(is_bounded=False), 3, 9630 * MIB, NO_OWN)
    rest = [pool - each.one_sequence for pool, each in zip(pools, MODELS, strict=True)]
    assert sum(pools) == pytest.approx(9630 * MIB, rel=1e-6)
    assert rest[0] / rest[1] == pytest.approx(8, rel=1e-3)
    assert rest[1] / rest[2] == pytest.approx(10, rel=1e-3)


def test_memory_that_a_model_cannot_use_goes_to_others() -> None:
    pools = split(needs(), 3, 9630 * MIB, NO_OWN)
    assert pools[2] == 40 * MIB
    assert sum(pools) == pytest.approx(9630 * MIB, rel=1e-6)
    assert split(needs(), 3, 10**12, NO_OWN) == [each.highest for each in MODELS]


def test_encoder_takes_no_pool_memory() -> None:
    path = str(encoder_checkpoint("bert"))
    found = needs_of([engine(model=path, dtype="float32", device="cpu")])
    both = Needs([found.models[0], unbounded(MODELS[0])], "cpu", found.free, found.total)
    pools = split(both, 2, 9000 * MIB, [None, None])
    assert pools[0] == 0 and pools[1] == pytest.approx(9000 * MIB, rel=1e-6)
    assert "no KV pool" in described(["bert", "llama"], both, pools, 2)[1]


@pytest.mark.parametrize("num_loaded", [1, 2, 3])
def test_models_loaded_together_stay_within_the_budget(num_loaded: int) -> None:
    budget = 3000 * MIB
    pools = split(needs(), num_loaded, budget, NO_OWN)
    sums = [sum(some) for some in itertools.combinations(pools, num_loaded)]
    assert max(sums) <= budget and max(sums) > 0.99 * budget
    assert all(pool >= each.one_sequence for pool, each in zip(pools, MODELS, strict=True))


def test_explicit_pool_size_is_kept() -> None:
    own = [None, 700 * MIB, None]
    pools = split(needs(), 3, 3000 * MIB, own)
    assert pools[1] == 700 * MIB and sum(pools) <= 3000 * MIB


def test_budget_below_one_sequence_each_is_rejected() -> None:
    with pytest.raises(OutOfMemory, match="600 MiB together, but .* needs 630 MiB"):
        split(needs(), 3, 600 * MIB, NO_OWN)
    assert split(needs(), 1, 600 * MIB, NO_OWN)[0] == pytest.approx(600 * MIB, rel=1e-3)


def test_cpu_budget_subtracts_the_needs_of_loaded_models() -> None:
    assert pool_budget(needs(), 3, engine()) == 5000 * MIB  # a quarter
    assert pool_budget(needs(free=9500), 3, engine()) == (9500 - 9100 - 160) * MIB
    assert pool_budget(needs(free=9500), 1, engine()) == (9500 - 8000 - 100) * MIB
    assert pool_budget(needs(), 3, engine(kv_cache_memory_bytes=77)) == 77
    with pytest.raises(OutOfMemory, match="9,260 MiB .* 9,000 MiB are free.*max_loaded_models"):
        pool_budget(needs(free=9000), 3, engine())


def test_gpu_budget_reserves_memory_for_each_process() -> None:
    found = pool_budget(needs("cuda"), 2, engine(gpu_memory_utilization=0.8))
    used = 9000 * MIB + 2 * GPU_CONTEXT_BYTES + 150 * MIB + 2 * GPU_RESERVE_BYTES
    assert found == int(20_000 * MIB * 0.8) - used


def test_memory_report_has_a_line_per_model() -> None:
    pools = split(needs(), 2, 3000 * MIB, NO_OWN)
    lines = described(["large", "middle", "s"], needs(), pools, 2)
    assert "3 models, 2 of them at once: 20,000 MiB are free" in lines[0]
    assert "large" in lines[1] and f"KV pool {pools[0] / MIB:,.0f} MiB" in lines[1]
    assert "weights 9,000 MiB, workspace 150 MiB" in lines[-1] and len(lines) == 5


def test_needs_are_computed_without_loading() -> None:
    path = str(text_checkpoint("llama"))
    configs = [
        engine(model=path, dtype="float32", device="cpu"),
        engine(model="demo", device="cpu"),
    ]
    found = needs_of(configs)
    tiny, demo = found.models
    assert found.device == "cpu" and found.free > 0
    assert 0 < tiny.weights < demo.weights and 0 < tiny.one_sequence <= (tiny.highest or 0)
    # One sequence of 128 tokens: 9 blocks of 16, keys and values of 2 layers, 2 heads of 8.
    assert tiny.one_sequence == pytest.approx(9 * 16 * 2 * 2 * 2 * 8 * 4, rel=0.06)


def test_error_names_the_model_that_cannot_be_loaded() -> None:
    with pytest.raises(QuireError, match="model demo: .*max_model_len"):
        needs_of([engine(model="demo", max_model_len=10**6)])


@pytest.mark.parametrize("wanted", [1, 70_000, 10**6, 10**9])
def test_min_bytes_finds_the_smallest_size_that_fits(wanted: int) -> None:
    found = min_bytes(lambda num_bytes: num_bytes >= wanted)
    assert wanted <= found <= max(wanted * 1.06, MIB // 16)
