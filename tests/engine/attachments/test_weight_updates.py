"""New weights in a running engine: later answers equal a fresh engine's, bit for bit.

Covers `runner/setup/new_weights.py` and `models/load/weight_files.py`.
"""

import gc
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.clock import MonotonicClock
from quire.base.errors import ConfigError, EngineBusy, RequestError
from quire.base.messages import ResetPrefixCache
from quire.base.requests.outputs import WeightsSpan
from quire.base.settings.config import config_from_flat
from quire.engine.attachments.weight_updates import WeightUpdates
from quire.engine.recording.calls import calls_of
from quire.engine.recording.files import read_recording
from quire.engine.start.build import build_core
from quire.models.checkpoint.source import resolve_model
from quire.ops.host.native import core
from quire.runner.warm.model import WarmModel
from quire.tools.replay import replay_all
from tests.serve.test_same_bits import Found, found
from tests.support.cases import slow_but
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import (
    changed,
    changed_tensors,
    checkpoint,
    pool_bytes,
)

PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_tokens(7, 22, 40, seed=3)]
PARAMS = SamplingParams(
    temperature=0.8, seed=1, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1
)
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 and int8 keys": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
    "torch": {"dtype": "float32", "attention_backend": "torch"},
    "n-gram drafts": {
        "dtype": "float32",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
}


def open_llm(model: Path, **settings: Any) -> LLM:
    defaults = {"max_model_len": 64, "block_size": 4, "disable_log_stats": True}
    return LLM(str(model), **(defaults | settings))


def answers(llm: LLM, params: SamplingParams = PARAMS) -> tuple[Found, list[Any]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return found(outputs), [output.prompt_logprobs for output in outputs]


@needs_core
@pytest.mark.parametrize("name", slow_but(SETTINGS, *SETTINGS.keys() - {"int8", "torch"}))
def test_updated_engine_answers_like_a_fresh_one(name: str) -> None:
    settings = SETTINGS[name]
    with open_llm(changed("qwen3", 1), **settings) as fresh:
        wanted = answers(fresh)
    with open_llm(checkpoint("qwen3"), **settings) as llm:
        before = answers(llm)
        assert before != wanted
        assert llm.update_weights(changed("qwen3", 1)) == "1"
        assert answers(llm) == wanted
        assert llm.update_weights(changed_tensors("qwen3", 2), "second") == "second"
        assert answers(llm) not in (before, wanted)
        llm.update_weights(checkpoint("qwen3"))
        assert answers(llm) == before


@pytest.mark.parametrize(
    "architecture",
    slow_but(
        ("qwen3_moe", "qwen3_5", "gpt2", "deepseek_v3", "llama4_text"), "qwen3_5", "deepseek_v3"
    ),
)
def test_every_model_family_can_be_updated_from_memory(architecture: str) -> None:
    """Experts, states, tied heads, latent and chunked attention."""
    with open_llm(changed(architecture, 1), dtype="float32") as fresh:
        wanted = answers(fresh)
    with open_llm(checkpoint(architecture), dtype="float32") as llm:
        answers(llm)
        llm.update_weights(changed_tensors(architecture, 1))
        assert answers(llm) == wanted


@needs_core
def test_blocks_of_old_weights_are_never_prefix_hits(tmp_path: Path) -> None:
    """Neither on the device, in host memory, nor in a directory. New blocks are hits as usual."""
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1, "dtype": "float32"}
    params = PARAMS.clone()
    params.prompt_logprobs = None
    with open_llm(checkpoint("qwen3"), **few, kv_disk_dir=str(tmp_path)) as llm:
        for seed in (1, 2):
            for _ in range(2):
                llm.generate(PROMPTS, params, use_tqdm=False)
            llm.update_weights(changed("qwen3", seed))
            for num_cached in (0, 36):
                [output] = llm.generate(PROMPTS[2:], params, use_tqdm=False)
                assert output.num_cached_tokens == num_cached
                with open_llm(changed("qwen3", seed), **few) as fresh:
                    assert found([output]) == found(fresh.generate(PROMPTS[2:], params))


def test_streams_continue_and_report_weights_versions() -> None:
    """A stream keeps its blocks; tokens before a swap come from the old weights."""
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        [old] = llm.generate(PROMPTS[:1], long, use_tqdm=False)
        assert old.outputs[0].weights_versions == ()
        stream = llm.stream(PROMPTS[0], long)
        tokens: list[int] = []
        ended: list[str | None] = []
        for num, version in ((5, "one"), (9, "two")):
            while len(tokens) < num:
                tokens += next(stream).outputs[0].token_ids
            updates_of(llm).begin(changed("qwen3", num), version, ended.append)
            updates_of(llm).wait()
        for output in stream:
            tokens += output.outputs[0].token_ids
        assert output.outputs[0].weights_versions == (WeightsSpan(5, "one"), WeightsSpan(9, "two"))
        assert ended == [None, None] and len(tokens) == 20
        assert tokens[:5] == old.outputs[0].token_ids[:5]
        assert tokens[5:] != old.outputs[0].token_ids[5:]
        [new] = llm.generate(PROMPTS[:1], long, use_tqdm=False)
        assert new.outputs[0].weights_versions == (WeightsSpan(0, "two"),)


@pytest.mark.parametrize("record_tokens", [True, False])
def test_recording_names_the_weights_version(record_tokens: bool, tmp_path: Path) -> None:
    """A recording without tokens redacts the name, like all text. Both recordings replay."""
    recorded = {"record": str(tmp_path), "record_tokens": record_tokens}
    with open_llm(checkpoint("llama"), dtype="float32", **recorded) as llm:
        answers(llm)
        llm.update_weights(changed("llama", 1), "step-1")
        answers(llm)
    [segment] = read_recording(tmp_path)
    values = [call.value for call in calls_of(segment.items)]
    epochs = [each.epoch for each in values if isinstance(each, ResetPrefixCache)]
    assert len(epochs) == 1
    assert epochs[0].startswith("weights 'step-1' " if record_tokens else "~")
    assert replay_all([segment]).difference is None


def updates_of(llm: LLM) -> WeightUpdates:
    found = llm.engine.client._updates  # type: ignore[union-attr]
    assert isinstance(found, WeightUpdates)
    return found


def test_retained_requests_are_recomputed_after_an_update() -> None:
    tokens = PROMPTS[1]["prompt_token_ids"]
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        session = llm.session()
        session.append(tokens)
        session.generate(SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        llm.update_weights(changed("qwen3", 1))
        [output] = session.generate(PARAMS).outputs
        prompt = session.token_ids[: -len(output.token_ids)]
        with open_llm(changed("qwen3", 1), dtype="float32") as fresh:
            [wanted] = fresh.generate({"prompt_token_ids": prompt}, PARAMS)
    assert output.token_ids == wanted.outputs[0].token_ids


@needs_core
def test_random_programs_answer_like_fresh_engines() -> None:
    """Requests, updates (some fail), sleeps, resets and pins in a small pool with preemption."""
    numbers = random.Random(59)
    tight = {"kv_cache_memory_bytes": pool_bytes(checkpoint("qwen3"), 24, 4, 4), "max_num_seqs": 3}
    settings: dict[str, Any] = {"dtype": "float32"}
    prompts = [{"prompt_token_ids": each} for each in random_tokens(9, 9, 17, 30, 41, seed=8)]
    prompts.append({"prompt_token_ids": prompts[3]["prompt_token_ids"][:20]})
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=12, ignore_eos=True, logprobs=1)
              for i in range(len(prompts))]  # fmt: skip
    wanted: list[Found] = []
    models = [checkpoint("qwen3"), changed("qwen3", 1), changed("qwen3", 2)]
    for model in models:
        with open_llm(model, **settings) as fresh:
            wanted.append(found(fresh.generate(prompts, params, use_tqdm=False)))
    current = 0
    with open_llm(models[0], **settings, **tight) as llm:
        for _ in range(40):
            action = numbers.choice(["ask", "ask", "update", "fail", "reset", "pin", "sleep"])
            if action == "ask":
                chosen = numbers.sample(range(len(prompts)), numbers.randint(1, len(prompts)))
                outputs = llm.generate(
                    [prompts[i] for i in chosen], [params[i] for i in chosen], use_tqdm=False
                )
                assert found(outputs) == [wanted[current][i] for i in chosen]
            elif action == "update":
                current = numbers.randrange(len(models))
                llm.update_weights(models[current])
            elif action == "fail":
                with pytest.raises(RequestError, match="lack"):
                    llm.update_weights(dict(list(changed_tensors("qwen3", 1).items())[1:]))
            elif action == "sleep":
                llm.sleep(level=numbers.choice([1, 2]))
                if numbers.random() < 0.5:
                    current = numbers.randrange(len(models))
                    llm.wake_up(tags=["weights"])
                    llm.update_weights(models[current])
                llm.wake_up()
            elif action == "reset":
                llm.reset_prefix_cache()
            else:
                llm.pin_prefix(prompts[numbers.randrange(2)], ttl_s=1000.0)
                for prefix in llm.pinned_prefixes()[1:]:
                    llm.unpin_prefix(prefix.id)


@pytest.mark.parametrize("has_plain_plans", [False, True])
def test_the_old_model_is_freed(has_plain_plans: bool, tmp_path: Path) -> None:
    """Even if the programs of plain plans hold its weights, as after a first start."""
    # Keep models of earlier tests alive: the new model could get the address of a freed one.
    others = [each for each in gc.get_objects() if _is_model(each)]
    # Without a saved start, the start needs torch and its model.
    cache = str(tmp_path) if has_plain_plans else "off"
    with open_llm(checkpoint("qwen3"), dtype="float32", weight_cache=cache) as llm:
        built = llm.engine.client.core.executor._built  # type: ignore[attr-defined]
        assert isinstance(built, WarmModel) == has_plain_plans
        found = (each for each in gc.get_objects() if _is_model(each))
        models = [weakref.ref(each) for each in found if not any(each is o for o in others)]
        assert models
        llm.update_weights(changed("qwen3", 1))
        gc.collect()
        assert all(model() is None for model in models)


def _is_model(found: object) -> bool:
    return type(found).__name__ == "NativeModel"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lack model.norm.weight"),
        (lambda t: t.update({"model.other": torch.zeros(2)}), "unknown tensors .model.other"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"has the shape \[3\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}),
            "holds I32, not floating-point numbers",
        ),
    ],
)
def test_wrong_tensors_leave_the_old_weights(change: Any, message: str) -> None:
    tensors = changed_tensors("qwen3", 1)
    change(tensors)
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match=message):
            llm.update_weights(tensors)
        assert answers(llm) == before


def test_other_models_are_refused(tmp_path: Path) -> None:
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        with pytest.raises(RequestError, match="different: model_type"):
            llm.update_weights(checkpoint("llama"))
        with pytest.raises(RequestError, match="does not exist on the engine's machine"):
            llm.update_weights(tmp_path / "nothing")
        with pytest.raises(RequestError, match=r"no \*.safetensors"):
            llm.update_weights(tmp_path)


@pytest.mark.slow
def test_updates_of_several_cores_or_ranks_are_rejected() -> None:
    with (
        LLM(str(checkpoint("llama")), max_model_len=64, data_parallel_size=2) as llm,
        pytest.raises(RequestError, match="weights of 2 cores cannot be replaced together"),
    ):
        llm.update_weights(changed("llama", 1))
    with (
        LLM(str(checkpoint("llama")), max_model_len=64, tensor_parallel_size=2) as llm,
        pytest.raises(RequestError, match="weights of ranks cannot be replaced"),
    ):
        llm.update_weights(changed("llama", 1))


def test_second_update_is_refused_and_a_close_ends_the_first() -> None:
    """The first update is still staged, and fails when the core closes."""
    config = config_from_flat(model=str(checkpoint("llama")), max_model_len=64)
    core_ = build_core(config, resolve_model(config.model.model), MonotonicClock()).core
    go = threading.Event()
    ended: list[str | None] = []

    def stage(path: Path) -> Any:
        assert go.wait(60)
        raise ConfigError("never used")

    updates = WeightUpdates(core_, stage)
    core_.attach(updates)
    updates.begin(Path("/x"), "", ended.append)
    with pytest.raises(EngineBusy, match="another update"):
        updates.begin(Path("/x"), "", ended.append)
    go.set()
    core_.close()
    assert len(ended) == 1 and ended[0] is not None and "has ended" in ended[0]


def test_failed_swap_is_reported_and_the_next_update_works() -> None:
    with open_llm(checkpoint("llama"), dtype="float32") as llm:
        updates = updates_of(llm)
        stage = updates._stage

        def fails(path: Path, is_partial: bool) -> Any:
            stage(path, is_partial)

            def swap() -> None:
                raise RuntimeError("the device is busy")

            return swap

        updates._stage = fails
        before = answers(llm)
        with pytest.raises(RequestError, match="cannot be used: RuntimeError: the device is busy"):
            llm.update_weights(changed("llama", 1))
        assert answers(llm) == before
        updates._stage = stage
        llm.update_weights(changed("llama", 1))
        assert answers(llm) != before


def test_changed_weights_under_the_same_version_are_announced() -> None:
    """Equal weights are not: they change no bits."""
    with open_llm(checkpoint("llama"), dtype="float32") as llm:
        updates, seen = updates_of(llm), list[str]()
        updates.on_change = seen.append
        for seed, expected in ((1, 1), (1, 1), (2, 2)):
            llm.update_weights(changed("llama", seed), "step")
            assert seen == ["step"] * expected
