"""A draft model in an engine: refused models, memory, and recordings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelNotFound, OutOfMemory
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.drafting.draft_pace import StepTimes
from quire.engine.recording.files import read_recording
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import ModelSource, resolve_model
from quire.models.draft_model import with_drafter
from quire.runner.build import build_runner
from quire.tools.replay import replay_all
from quire.tools.replay_model import replay_with_model
from tests.support.models.reference_checkpoints import checkpoint, text_checkpoint, write_checkpoint
from tests.support.render.tiny_tokenizers import fresh_directory, write_directory

PROMPTS = [[5, 9, 13, 2, 40], [7] * 17, list(range(20, 60))]
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
FEW: dict[str, Any] = {"max_model_len": 96, "dtype": "float32", "kv_cache_memory_bytes": 4 << 20}


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


def drafted_by(model: str | Path, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "draft_model", "model": str(model)} | more}


def engine(model: str | Path, **settings: Any) -> LLM:
    return LLM(str(model), disable_log_stats=True, **(FEW | settings))


def config_of(model: str | Path, **settings: Any) -> tuple[EngineConfig, ModelSource]:
    config = config_from_flat(model=str(model), **(FEW | settings))
    return config, resolve_model(config.model.model)


# ---- refused models --------------------------------------------------------------------------


def test_draft_model_with_another_vocabulary_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 120 tokens, but .* has 97.*same family"):
        engine(checkpoint("llama"), **drafted_by(checkpoint("llama", 120)))


def test_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """The vocabularies have the same size."""
    other = write_checkpoint(write_directory(fresh_directory(), "metaspace"), "llama", 424)
    with pytest.raises(
        ConfigError, match=r"has a different vocabulary from .*: token \d+ is .*, not "
    ):
        engine(text_checkpoint("llama"), **drafted_by(other))
    engine(text_checkpoint("llama"), **drafted_by(checkpoint("gpt2", 424))).close()


def test_draft_model_with_states_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers with states.*without such layers"):
        engine(checkpoint("llama"), **drafted_by(checkpoint("qwen3_5")))


def test_eagle3_head_is_refused_as_a_draft_model(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is an EAGLE-3 head.*method eagle3"):
        engine(checkpoint("llama"), **drafted_by(tmp_path / "head"))


def test_missing_draft_model_is_reported() -> None:
    with pytest.raises(ModelNotFound, match="/no/where"):
        engine(checkpoint("llama"), **drafted_by("/no/where"))


def test_lack_of_memory_for_draft_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    config, source = config_of(checkpoint("llama"), **drafted_by("demo"))
    monkeypatch.setattr("quire.models.draft_model._check", lambda *_: None)
    monkeypatch.setattr("quire.runner.build.available_cpu_bytes", lambda: 4 << 20)
    with pytest.raises(OutOfMemory, match=r"weights .* exceed the free memory"):
        build_runner(config, source)


# ---- names ---------------------------------------------------------------------------------


def test_draft_weights_are_part_of_the_cache_fingerprint(tmp_path: Path) -> None:
    """Even if two draft models differ only in the values of their weights."""
    found = []
    stored = {"kv_disk_dir": str(tmp_path / "blocks")}
    for i, seed in enumerate((0, 1, None)):
        draft = {}
        if seed is not None:
            draft = drafted_by(write_checkpoint(tmp_path / str(i) / "draft", "llama", 97, seed))
        config, source = config_of(checkpoint("qwen3"), **stored, **draft)
        found.append(make_scheduler(build_runner(config, source), source).memory.names.fingerprint)
    assert len(set(found)) == 3


def test_model_without_a_drafter_keeps_its_spec() -> None:
    config, source = config_of(checkpoint("qwen3"))
    spec, no_drafter = with_drafter(build_runner(config, source).spec, None, source)
    assert no_drafter is None and spec.drafter is None
    assert spec.cache_groups == spec.own_groups


# ---- recordings ------------------------------------------------------------------------------


def test_recording_replays_without_the_draft_model(tmp_path: Path) -> None:
    model, draft = checkpoint("llama"), checkpoint("gpt2")
    settings = {"record": str(tmp_path), "record_tokens": True, **drafted_by(draft)}
    with engine(model, **settings) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    outcome = replay_all(read_recording(tmp_path))
    assert outcome.difference is None
    outcome = replay_with_model(read_recording(tmp_path), {})
    assert outcome.difference is None
    assert "sampled tokens are identical" in outcome.notes[-1]
