"""A draft model changes no bit of any answer. If the draft model is the target itself, all drafts
are accepted: it has the same logits and the same noise."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.events import Preempted, Stepped
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.drafting.draft_pace import StepTimes
from quire.models.checkpoint.source import ModelSource, resolve_model
from quire.ops.host.native import core
from quire.runner.build import build_runner
from quire.runner.memory_plan import spare_blocks, workspace_of
from quire.runner.setup.preview import preview_runner
from quire.tools.devices import Device
from quire.tools.sizing.fit import fit
from tests.support.cases import in_turn, slow_but
from tests.support.engine.attachments import drafter_of
from tests.support.models.reference_checkpoints import (
    ARCHITECTURES,
    checkpoint,
    pool_bytes,
    write_checkpoint,
)

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=25, top_p=0.9, n=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=6, max_tokens=30, top_k=20, min_p=0.02, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=7, max_tokens=19, logprobs=0, ignore_eos=True),
]
PROMPTS = [[5, 9, 13, 2, 40], [7] * 17, list(range(20, 60)), [3]]


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the number of draft tokens independent of the machine's speed."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


class Counts:
    """Count an engine's proposed and accepted draft tokens, steps and preemptions."""

    def __init__(self, llm: LLM) -> None:
        self.tried = self.right = self.steps = self.preempted = 0
        llm.engine.client.core.subscribe(self._see)

    def _see(self, event: Any) -> None:
        self.preempted += isinstance(event, Preempted)
        if isinstance(event, Stepped):
            self.steps += 1
            self.tried += event.num_draft_tokens
            self.right += event.num_accepted


@contextmanager
def engine(model: str | Path, draft: str | Path | None = None, **settings: Any) -> Iterator[LLM]:
    """Yield an engine; it has no drafter if draft is None."""
    with LLM(str(model), disable_log_stats=True, **settings_of(draft, **settings)) as llm:
        yield llm


def settings_of(draft: str | Path | None, **settings: Any) -> dict[str, Any]:
    num = settings.pop("num", 4)
    if draft is not None:
        settings["speculative_config"] = {
            "method": "draft_model", "model": str(draft), "num_speculative_tokens": num,
        }  # fmt: skip
    defaults = {"max_model_len": 96, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    return defaults | settings


def config_of(
    model: Path, draft: Path | None = None, **settings: Any
) -> tuple[EngineConfig, ModelSource]:
    config = config_from_flat(model=str(model), **settings_of(draft, **settings))
    return config, resolve_model(config.model.model)


def answers(llm: LLM, params: Any = PARAMS, prompts: Any = PROMPTS) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(c.token_ids, c.finish_reason, c.cumulative_logprob, c.logprobs) for c in o.outputs]
        for o in outputs
    ]


def compared(model: Any, draft: Any, **settings: Any) -> Counts:
    """Run with and without a draft model, and assert bit-identical answers."""
    with engine(model, **(settings | {"num": 0})) as llm:
        plain = answers(llm)
    with engine(model, draft, **settings) as llm:
        counts = Counts(llm)
        assert answers(llm) == plain
    return counts


FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
]


@needs_core
@pytest.mark.parametrize("settings", slow_but(FORMATS, FORMATS[3]), ids=str)
def test_all_drafts_of_the_target_itself_are_accepted(settings: dict[str, Any]) -> None:
    counts = compared("demo", "demo", **settings)
    assert counts.tried == counts.right > 80


@pytest.mark.parametrize(
    "architecture",
    slow_but(
        [a for a in ARCHITECTURES if a not in ("qwen3_5", "qwen3_5_text")],
        *("gpt2", "mistral", "deepseek_v3"),
    ),
)
def test_all_drafts_are_accepted_in_each_architecture(architecture: str) -> None:
    model = checkpoint(architecture)
    counts = compared(model, model)
    assert counts.tried == counts.right > 80


def test_only_some_drafts_of_another_model_are_accepted(tmp_path: Path) -> None:
    """The draft model has other layers, heads and cache groups than the target."""
    counts = compared(checkpoint("gemma2"), checkpoint("gpt2"))
    assert 0 < counts.right < counts.tried
    counts = compared(checkpoint("llama"), checkpoint("gemma2"))
    assert 0 < counts.right < counts.tried


def test_drafts_do_not_change_answers_of_a_model_with_states() -> None:
    counts = compared(checkpoint("qwen3_5"), checkpoint("llama"))
    assert 0 < counts.right < counts.tried


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_other_backends_accept_most_drafts(backend: str) -> None:
    """The order of their sums depends on the step."""
    model = checkpoint("gemma2")
    with engine(model, model, attention_backend=backend) as llm:
        counts = Counts(llm)
        answers(llm)
    assert counts.tried > 80 and counts.right > 0.9 * counts.tried


@pytest.mark.parametrize(
    ("architecture", "settings"),
    in_turn(
        ["llama", "mistral", "llama4_text"],
        [
            {"num": 20, "block_size": 8},
            {"max_num_batched_tokens": 8},
            {"pipeline_depth": 1, "max_num_seqs": 2},
            {"pipeline_depth": 3},
            {"enable_prefix_caching": False},
        ],
    ),
    ids=str,
)
def test_drafts_over_several_blocks_and_chunked_prompts_are_accepted(
    architecture: str, settings: dict[str, Any]
) -> None:
    model = checkpoint(architecture)
    counts = compared(model, model, **settings)
    assert counts.right == counts.tried > 0


@pytest.mark.parametrize(
    ("pool", "mode"), in_turn([("llama", 11), ("gemma2", 16)], ["recompute", "swap"])
)
def test_drafts_with_little_memory_do_not_change_answers(pool: tuple[str, int], mode: str) -> None:
    """No row is preempted for blocks of draft tokens. A resumed row gets drafts again."""
    architecture, num_blocks = pool
    model = checkpoint(architecture)
    num_bytes = 2 * pool_bytes(model, num_blocks, 8, 4)
    short = {
        "block_size": 8, "kv_cache_memory_bytes": num_bytes, "preemption_mode": mode,
        "max_model_len": 72,
    }  # fmt: skip
    with engine(model, max_model_len=72) as llm:
        plain = answers(llm)
    with engine(model, model, **short) as llm:
        counts = Counts(llm)
        assert answers(llm) == plain
    assert counts.right == counts.tried > 0
    assert counts.preempted > 0


def test_prefix_hits_include_the_keys_of_the_drafter(tmp_path: Path) -> None:
    """This includes hits on a disk after a restart."""
    model, long = checkpoint("llama"), [list(range(70)), list(range(69)) + [1]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    settings = {"kv_disk_dir": str(tmp_path / "blocks"), "max_model_len": 128}
    with engine(model, max_model_len=128) as llm:
        plain = answers(llm, params, long)
    for _ in range(2):
        with engine(model, model, **settings) as llm:
            counts = Counts(llm)
            assert [answers(llm, params, long) for _ in range(2)] == [plain] * 2
        assert counts.right == counts.tried > 0


def test_block_names_depend_on_the_draft_model(tmp_path: Path) -> None:
    """An engine with another draft model, or none, does not read the cache of the first."""
    model, blocks = checkpoint("llama"), str(tmp_path / "blocks")
    params = SamplingParams(temperature=0.0, max_tokens=2)
    hits = []
    for draft in (model, checkpoint("gpt2"), None, model):
        with engine(model, draft, kv_disk_dir=blocks) as llm:
            [output] = llm.generate([list(range(50))], params, use_tqdm=False)
            hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0, 48]


def test_paused_drafter_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While drafting pauses, the draft model computes no tokens. Then it catches up, in several
    passes if necessary, and its drafts are accepted again."""
    model = checkpoint("llama")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=70, ignore_eos=True)
    with engine(model) as llm:
        plain = answers(llm, params, [[5, 9, 13]])
    with engine(model, model, max_num_batched_tokens=16) as llm:
        counts, drafting = Counts(llm), drafter_of(llm.engine.client.core)
        sizes: list[list[int]] = []
        draft = drafting._draft
        monkeypatch.setattr(
            drafting,
            "_draft",
            lambda order: sizes.append(order.num_tokens.tolist()) or draft(order),
        )
        monkeypatch.setattr(
            "quire.engine.drafting.model_drafting.lengths",
            lambda most, *_, **__: most if counts.steps > 40 else [0] * len(most),
        )
        assert answers(llm, params, [[5, 9, 13]]) == plain
    assert sizes[:2] == [[16], [16]] and sizes[2][0] < 16
    assert max(max(each) for each in sizes[3:]) <= 6
    assert counts.right == counts.tried > 0


def test_failed_drafter_ends_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint("llama")
    with engine(model) as llm:
        plain = answers(llm)
    with engine(model, model) as llm:
        counts, drafting = Counts(llm), drafter_of(llm.engine.client.core)

        def fail(order: Any) -> Any:
            raise RuntimeError("no luck")

        with caplog.at_level("WARNING", "quire"):
            monkeypatch.setattr(drafting, "_draft", fail)
            assert answers(llm) == plain
    assert counts.tried == 0
    assert "a draft model failed and stops drafting for" in caplog.text


def test_drafts_end_at_the_draft_models_maximum_length(tmp_path: Path) -> None:
    """The draft model has no positions after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.models.reference_checkpoints.CONFIGS", dict(_short_gpt2()))
        short = write_checkpoint(tmp_path / "short", "gpt2", 97)
    model = checkpoint("gpt2")
    counts = compared(model, short, max_model_len=96)
    assert counts.tried > 0


def _short_gpt2() -> Iterator[tuple[str, Any]]:
    from tests.support.models.reference_checkpoints import CONFIGS

    config, model, fields = CONFIGS["gpt2"]
    yield "gpt2", (config, model, fields | {"n_positions": 24})


@pytest.mark.parametrize("draft", ["llama", "gemma2"])
def test_memory_plan_includes_the_draft_model(draft: str) -> None:
    """`fit`, the preview and the engine agree. The drafter has as many blocks as the target."""
    config, source = config_of(
        checkpoint("qwen3"), checkpoint(draft), kv_cache_memory_bytes=1 << 20
    )
    plain, _ = config_of(checkpoint("qwen3"), kv_cache_memory_bytes=1 << 20)
    built, alone = build_runner(config, source), build_runner(plain, source)
    device = Device("a CPU", "cpu", built.memory.total_bytes)
    found, preview = fit(config, source, device), preview_runner(config, source)
    assert found.memory.weights_bytes == preview.weights_bytes == built.memory.weights_bytes
    assert built.memory.weights_bytes > alone.memory.weights_bytes
    assert found.memory.num_blocks == built.memory.num_blocks
    assert found.memory.workspace_bytes == built.memory.workspace_bytes
    names = [each.name for each in found.weights]
    assert any(name.startswith("draft model") for name in names) and len(names) > 1
    layers = [layer for group in built.spec.cache_groups for layer in group.layers]
    assert sorted(layers) == list(range(4))
    assert built.memory.num_blocks[0] < alone.memory.num_blocks[0]


def test_draft_tokens_have_spare_blocks_after_the_pool() -> None:
    config, source = config_of(checkpoint("qwen3"), checkpoint("llama"), num=9, block_size=4)
    built = build_runner(config, source)
    assert spare_blocks(built.config) == 3
    num_rows = built.config.scheduler.max_num_seqs or 0
    of_target, of_draft = (kv.shape[3] for kv in built.runner.backend._memory.kv)
    assert of_draft == of_target + 3 * num_rows == built.memory.num_blocks[1] + 3 * num_rows
    without = dataclasses.replace(built.spec, drafter=None)
    assert workspace_of(built.config, built.spec) > workspace_of(built.config, without)
