"""Requests with adapters get the tokens of the merged model, whatever else the engine does."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.base.errors import RequestError
from quire.base.events import Event, Preempted
from quire.engine.recording.files import read_recording
from quire.models.checkpoint.files import safetensors_shapes, weight_files
from quire.ops.host.native import core
from quire.render.renderer import RenderedPrompt
from quire.tools.replay import replay_all
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.runner.adapters import merge, write_adapter

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")

RANKS = 1, 8, 64, 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
# Prompts that begin with the same blocks, which adapters must not share.
SHARED, *TAILS = random_tokens(8, 3, 7, 2, 5, 9)
PROMPTS: list[Any] = [{"prompt_token_ids": SHARED + tail} for tail in TAILS]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "block_size": 4, "disable_log_stats": True,
}  # fmt: skip
ENABLED = {"enable_lora": True, "max_lora_rank": 256}


@dataclass(frozen=True)
class Files:
    """A checkpoint and its adapters, by rank."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def adapter(self, rank: int) -> LoRARequest:
        return LoRARequest(f"rank-{rank}", rank, str(self.folder / f"{rank}"))

    @cache  # noqa: B019 (lives as long as the module)
    def merged(self, rank: int) -> Path:
        return merge(self.base, self.folder / f"{rank}", self.folder / f"merged-{rank}")

    @property
    def adapters(self) -> list[LoRARequest | None]:
        """Return one adapter for each of PROMPTS; the first has none."""
        return [None, *map(self.adapter, RANKS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_checkpoint(folder / "base", "llama").directory
    shapes = safetensors_shapes(weight_files(base))
    modules = {n.removesuffix(".weight"): (s[0], s[1]) for n, s in shapes.items() if "_proj" in n}
    for rank in RANKS:
        write_adapter(folder / f"{rank}", modules, rank, seed=rank)
    return Files(folder)


def open_llm(directory: Path, **settings: Any) -> LLM:
    return LLM(str(directory), **(SETTINGS | settings))


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def from_merged(files: Files, params: SamplingParams, **settings: Any) -> list[list[list[int]]]:
    """Return the tokens of each of PROMPTS from a separate merged model."""
    found = []
    for prompt, rank in zip(PROMPTS, (None, *RANKS), strict=True):
        with open_llm(files.base if rank is None else files.merged(rank), **settings) as llm:
            found += tokens_of(llm.generate([prompt], params, use_tqdm=False))
    return found


@pytest.fixture(scope="module")
def greedy(files: Files) -> list[list[list[int]]]:
    return from_merged(files, GREEDY)


@pytest.fixture
def llm(files: Files) -> Iterator[LLM]:
    with open_llm(files.base, **ENABLED) as llm:
        yield llm


def test_batch_with_adapters_of_all_ranks_matches_merged_models(
    files: Files, llm: LLM, greedy: list[list[list[int]]]
) -> None:
    found = tokens_of(llm.generate(PROMPTS, GREEDY, False, lora_request=files.adapters))
    assert found == greedy
    assert len({str(each) for each in found}) == len(found)


def test_prefix_hits_never_cross_adapters(
    files: Files, llm: LLM, greedy: list[list[list[int]]]
) -> None:
    """Each adapter computes the shared prefix itself and later hits only its own blocks."""
    for prompt, adapter, expected in zip(PROMPTS, files.adapters, greedy, strict=True):
        for cached in (0, 8):
            [output] = llm.generate([prompt], GREEDY, False, lora_request=adapter)
            assert tokens_of([output]) == [expected]
            assert (output.num_cached_tokens or 0) // 4 * 4 >= cached
            assert cached or not output.num_cached_tokens


def test_pinned_prefix_is_recomputed_with_its_adapter(
    files: Files, greedy: list[list[list[int]]]
) -> None:
    """The cache was reset while another adapter had its slot."""
    with open_llm(files.base, **ENABLED, max_loras=1) as llm:
        client, adapter = llm.engine.client, files.adapter(8)
        [maker] = llm.makers(adapter, 1)
        client.add(maker.make_pin(RenderedPrompt(SHARED), 0.0))
        while client.num_unfinished:
            client.step()
        llm.generate(PROMPTS[1:2], GREEDY, False, lora_request=files.adapter(1))
        llm.reset_prefix_cache()
        for cached in (0, len(SHARED)):
            [output] = llm.generate(PROMPTS[2:3], GREEDY, False, lora_request=adapter)
            assert tokens_of([output]) == [greedy[2]]
            assert (output.num_cached_tokens or 0) >= cached
            assert [prefix.is_ready for prefix in llm.pinned_prefixes()] == [True]


@pytest.mark.parametrize("max_loras", [1, 2])
def test_adapters_wait_for_slots(
    files: Files, greedy: list[list[list[int]]], max_loras: int
) -> None:
    with open_llm(files.base, **ENABLED, max_loras=max_loras) as llm:
        for _ in range(2):
            found = tokens_of(llm.generate(PROMPTS, GREEDY, False, lora_request=files.adapters))
            assert found == greedy


def test_preempted_requests_keep_their_adapters(
    files: Files, greedy: list[list[list[int]]]
) -> None:
    [prompts, adapters, expected] = [each * 3 for each in (PROMPTS, files.adapters, greedy)]
    with open_llm(files.base, **ENABLED, kv_cache_memory_bytes=40_000) as llm:
        llm.generate(prompts, GREEDY, False, lora_request=adapters)  # loads all adapters
        llm.reset_prefix_cache()
        events = list[Event]()
        llm.engine.client.core.subscribe(events.append)
        found = tokens_of(llm.generate(prompts, GREEDY, False, lora_request=adapters))
        assert found == expected
        assert any(isinstance(event, Preempted) for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=8, ignore_eos=True),
        SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[3], logprobs=2),
    ],
)
def test_samples_beams_and_stop_tokens_match_merged_models(
    files: Files, params: SamplingParams
) -> None:
    with open_llm(files.base, **ENABLED) as llm:
        found = tokens_of(llm.generate(PROMPTS, params, False, lora_request=files.adapters))
    assert found == from_merged(files, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"speculative_config": '{"method": "suffix", "num_speculative_tokens": 3}'},
        {"pipeline_depth": 2},
        {"max_num_batched_tokens": 16},
        {"tensor_parallel_size": 2},
    ],
    ids=["ngram", "suffix", "pipeline_depth", "chunks", "tensor_parallel"],
)
def test_settings_do_not_change_tokens(
    files: Files, greedy: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    with open_llm(files.base, **ENABLED, **settings) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, False, lora_request=files.adapters))
    assert found == greedy


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_base_weights_keep_batch_invariance(files: Files, quantization: str) -> None:
    """The adapters' weights are not quantised. A row has the same bits as alone."""
    with open_llm(files.base, **ENABLED, quantization=quantization) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, False, lora_request=files.adapters))
    alone = []
    for prompt, adapter in zip(PROMPTS, files.adapters, strict=True):
        with open_llm(files.base, **ENABLED, quantization=quantization) as llm:
            alone += tokens_of(llm.generate([prompt], GREEDY, False, lora_request=adapter))
    assert found == alone
    assert len({str(each) for each in found}) == len(found)


def test_unusable_adapter_fails_only_its_request(files: Files, llm: LLM, tmp_path: Path) -> None:
    wrong = write_adapter(tmp_path / "wrong", {"model.layers.0.self_attn.q_proj": (8, 8)})
    given = [None, LoRARequest("wrong", 1, str(wrong))]
    good, bad = llm.generate(PROMPTS[:2], GREEDY, False, lora_request=given)
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    error = bad.outputs[0].error
    assert error is not None and "trained on another model" in error.message
    with pytest.raises(RequestError, match="has no adapter_config.json"):
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=LoRARequest("x", 1, str(tmp_path)))


def test_changed_adapter_files_are_loaded_as_a_new_adapter(
    files: Files, llm: LLM, tmp_path: Path, greedy: list[list[list[int]]]
) -> None:
    shapes = safetensors_shapes(weight_files(files.base))
    modules = {n.removesuffix(".weight"): (s[0], s[1]) for n, s in shapes.items() if "_proj" in n}
    adapter = LoRARequest("changing", 1, str(tmp_path / "a"))
    found = []
    for seed in (3, 8):
        write_adapter(tmp_path / "a", modules, 8, seed=seed)
        found += tokens_of(llm.generate(PROMPTS[2:3], GREEDY, False, lora_request=adapter))
    assert found[1] == greedy[2] != found[0]


def test_engine_without_adapters_rejects_them(files: Files) -> None:
    with open_llm(files.base) as llm, pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=files.adapter(8))


def test_recording_with_adapters_replays_without_them(files: Files, tmp_path: Path) -> None:
    with open_llm(files.base, **ENABLED, record=str(tmp_path / "recording")) as llm:
        llm.generate(PROMPTS, GREEDY, False, lora_request=files.adapters)
    outcome = replay_all(read_recording(tmp_path / "recording"))
    assert outcome.difference is None and outcome.num_requests == len(PROMPTS)
