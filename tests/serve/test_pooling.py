"""`LLM` with pooling models, compared with transformers: embeddings, classes and scores.

Covers `runner/pooler.py`, `base/requests/pooling_params.py` and `render/pooling_prompts.py`.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, AsyncLLM, PoolingParams, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.base.settings.config import config_from_flat
from quire.base.step_outputs import SequenceUpdate, StepOutputs
from quire.engine.recording.files import read_recording
from quire.engine.wire.wire import LENGTH, client_codec, core_codec
from quire.models.checkpoint.source import resolve_source
from quire.render.pooling_prompts import joined
from quire.runner.derive import derive_config
from quire.runner.setup.preview import preview_runner
from quire.spec.model_spec import load_spec
from quire.spec.pooling_spec import with_pooling
from quire.tools.devices import CPU, Device
from quire.tools.replay import replay_all
from quire.tools.sizing.fit import fit
from tests.support.models.checkpoints import random_tokens
from tests.support.models.pooling_checkpoints import (
    class_logits,
    hidden_states,
    pooling_checkpoint,
    with_modules,
)
from tests.support.models.reference_checkpoints import MAX_POSITION

IDS = random_tokens(23, 5, MAX_POSITION, 1, 61)
RAW = PoolingParams(use_activation=False)
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 3}


def open_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"disable_log_stats": True, "block_size": 4, "kv_cache_memory_bytes": 4 << 20}
    return LLM(str(folder), **(defaults | settings))


def softmax(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(numbers).softmax(0).numpy()


def sigmoid(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(numbers).sigmoid().numpy()


def embed(llm: LLM, ids: Sequence[list[int]], params: PoolingParams = RAW) -> list[np.ndarray]:
    outputs = llm.embed([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    return [np.array(output.outputs.embedding) for output in outputs]


def near(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    assert np.std(wanted[0]) > 0.1, "the expected values vary too little"
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


# ---- embeddings ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_hidden_states_match_transformers(kind: str) -> None:
    """Prompts run in chunks, then again: from cached blocks where the pooling allows it."""
    folder = pooling_checkpoint("embed")
    states = hidden_states(folder, IDS)
    taken = {"LAST": lambda h: h[-1], "MEAN": lambda h: h.mean(0), "CLS": lambda h: h[0]}[kind]
    config = {"seq_pooling_type": kind}
    with open_llm(folder, dtype="float64", pooler_config=config, **CHUNKS) as llm:
        near(embed(llm, IDS), [taken(each) for each in states])
        again = llm.encode([{"prompt_token_ids": each} for each in IDS], RAW, use_tqdm=False)
        near([each.outputs.data for each in again], [taken(each) for each in states])
        assert (again[0].num_cached_tokens > 0) == (kind == "LAST")
        assert llm.engine.config.model.runner == "pooling"


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_batching_and_chunks_leave_embeddings_bit_identical(kind: str) -> None:
    """By the C++ core in float32: alone, batched, chunked, preempted, and after a prefix hit."""
    folder, found = pooling_checkpoint("generate"), []
    config = {"seq_pooling_type": kind}
    for settings in ({}, CHUNKS, CHUNKS | {"kv_cache_memory_bytes": 72 << 10}):
        with open_llm(folder, runner="pooling", pooler_config=config, **settings) as llm:
            if not settings:
                found += [[embed(llm, [each])[0] for each in IDS]]
            found += [embed(llm, IDS), embed(llm, IDS[::-1])[::-1]]
    for other in found[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_embeddings_are_normalised_and_cut_to_dimensions() -> None:
    with open_llm(pooling_checkpoint("embed")) as llm:
        whole = embed(llm, IDS[:2])
        unit = [each / np.linalg.norm(each) for each in whole]
        for got, wanted in zip(embed(llm, IDS[:2], PoolingParams()), unit, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
        for got, raw in zip(embed(llm, IDS[:2], PoolingParams(dimensions=8)), whole, strict=True):
            np.testing.assert_allclose(got, raw[:8] / np.linalg.norm(raw[:8]), rtol=1e-12)
        with pytest.raises(RequestError, match="dimensions must be from 1 to 32"):
            embed(llm, IDS[:1], PoolingParams(dimensions=33))


def test_sentence_transformers_modules_apply_in_order() -> None:
    folder = with_modules(
        pooling_checkpoint("embed"),
        ("Pooling", "1_Pooling", {"pooling_mode": "mean"}),
        ("Dense", "2_Dense", {"activation_function": "torch.nn.modules.activation.Tanh"}),
        ("Normalize", "3_Normalize", None),
    )
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    means = [each.mean(0) for each in hidden_states(folder, IDS[:2])]
    dense = [np.tanh(weight.double().numpy() @ each) for each in means]
    with open_llm(folder, dtype="float64") as llm:
        near(embed(llm, IDS[:2], PoolingParams()), [each / np.linalg.norm(each) for each in dense])


# ---- classes and scores ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classify", "llama_score"])
def test_classes_match_transformers(kind: str) -> None:
    folder = pooling_checkpoint(kind)
    logits = class_logits(folder, IDS)
    prompts = [{"prompt_token_ids": each} for each in IDS]
    with open_llm(folder, dtype="float64", **CHUNKS) as llm:
        raw = llm.encode(prompts, RAW, use_tqdm=False, pooling_task="classify")
        near([each.outputs.data for each in raw], logits)
        found = llm.classify(prompts, use_tqdm=False)
        near([np.array(each.outputs.probs) for each in found], [softmax(each) for each in logits])
        assert found[0].outputs.num_classes == 3
        with pytest.raises(RequestError, match="this model has 3 classes"):
            llm.score("a", "b", use_tqdm=False)
        with pytest.raises(RequestError, match="gives classes, not embeddings"):
            llm.embed("a", use_tqdm=False)


def test_cross_encoder_scores_match_transformers() -> None:
    folder = pooling_checkpoint("classify", num_labels=1)
    with open_llm(folder, dtype="float64") as llm:
        tokenizer = llm.get_tokenizer()
        pairs = [
            tokenizer.encode("a fox", False) + tokenizer.encode(t, False) for t in ("b", "c d")
        ]
        wanted = [sigmoid(each) for each in class_logits(folder, pairs)]
        found = llm.score("a fox", ["b", "c d"], use_tqdm=False)
        assert [each.prompt_token_ids for each in found] == pairs
        for each, score in zip(found, wanted, strict=True):
            assert each.outputs.score == pytest.approx(score[0], abs=1e-10)


def test_reranker_score_comes_from_two_rows_of_the_lm_head() -> None:
    """The score's weight is the difference of two tokens' rows, as for Qwen 3's rerankers."""
    folder = pooling_checkpoint("generate")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    table = load_file(folder / "model.safetensors")["lm_head.weight"].double().numpy()
    with open_llm(folder, dtype="float64", hf_overrides=overrides) as llm:
        no, yes = (llm.get_tokenizer().token_id(token) for token in "ny")
        [found] = llm.score("a fox", "a dog", use_tqdm=False)
    last = hidden_states(folder, [found.prompt_token_ids])[0][-1]
    two = softmax(table[[no, yes]] @ last)
    assert found.outputs.score == pytest.approx(two[1], abs=1e-10)


def test_scores_of_embeddings_are_cosines() -> None:
    with open_llm(pooling_checkpoint("embed")) as llm:
        one, two, three = embed(llm, IDS[:3])
        texts = [{"prompt_token_ids": each} for each in IDS[:3]]
        found = llm.score(texts[:1], texts[1:], use_tqdm=False)
        for got, other in zip(found, (two, three), strict=True):
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert got.outputs.score == pytest.approx(cosine, abs=1e-12)
        assert found[1].prompt_token_ids == IDS[0] + IDS[2]
        with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 3"):
            llm.score(texts[:2], texts, use_tqdm=False)


# ---- supported features and limits -----------------------------------------------------------


def test_pooling_recording_replays(tmp_path: Path) -> None:
    record = str(tmp_path / "record")
    with open_llm(pooling_checkpoint("embed"), record=record, **CHUNKS) as llm:
        embed(llm, IDS)
    outcome = replay_all(read_recording(tmp_path / "record"))
    assert outcome.difference is None


def test_pooled_values_keep_all_bits_on_the_wire() -> None:
    numbers = np.array([1 / 3, -0.0, 1e300])
    sent = StepOutputs(details=[SequenceUpdate("a", pooled=numbers)])
    got = client_codec().decode(core_codec().encode(sent)[LENGTH.size :])
    assert isinstance(got, StepOutputs)
    found = got.details[0].pooled
    assert found is not None and found.dtype == np.float64
    assert found.tobytes() == numbers.tobytes()


def test_core_process_returns_the_same_bits() -> None:
    async def ask() -> list[np.ndarray]:
        found = []
        async with await AsyncLLM.create(str(pooling_checkpoint("embed"))) as llm:
            for ids in IDS[:3]:
                outputs = [each async for each in llm.encode({"prompt_token_ids": ids}, RAW)]
                found += [each.outputs.data for each in outputs]
            with pytest.raises(RequestError, match="this engine returns embeddings"):
                await anext(llm.generate("a"))
        return found

    with open_llm(pooling_checkpoint("embed")) as llm:
        wanted = embed(llm, IDS[:3])
    for one, other in zip(asyncio.run(ask()), wanted, strict=True):
        assert np.array_equal(one, other)


def test_pooling_checkpoints_are_previewed_and_fit() -> None:
    for kind in ("embed", "classify"):
        folder = str(pooling_checkpoint(kind))
        config = config_from_flat(model=folder, device="cpu")
        source = resolve_source(config.model)
        assert preview_runner(config, source).config.model.runner == "pooling"
        assert not fit(config, source, Device("cpu", CPU, 4 << 30)).warnings


def test_generating_and_pooling_models_reject_each_others_calls() -> None:
    with open_llm(pooling_checkpoint("generate")) as llm:
        with pytest.raises(RequestError, match="generates text and does not return embeddings"):
            llm.embed("a", use_tqdm=False)
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    with open_llm(pooling_checkpoint("embed")) as llm:
        with pytest.raises(RequestError, match="this engine returns embeddings"):
            llm.generate("a", use_tqdm=False)
        with pytest.raises(RequestError, match="pooling_task must be embed or classify"):
            llm.encode("a", use_tqdm=False, pooling_task="token_embed")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config needs a model that"),
        ({"tensor_parallel_size": 2}, "in its engine's process"),
        ({"kv_disk_dir": "/nowhere"}, "dir:/nowhere: a model that pools all tokens"),
    ],
)
def test_settings_of_generating_models_are_rejected(settings: dict[str, Any], words: str) -> None:
    folder = pooling_checkpoint("embed")
    pooler = {"pooling_type": "MEAN"}
    config = config_from_flat(model=str(folder), pooler_config=pooler, **settings)
    spec = with_pooling(load_spec(folder), folder, config.model)
    with pytest.raises(ConfigError, match=words):
        derive_config(config, spec, "cpu")


def test_prompts_may_fill_max_model_len_or_be_truncated() -> None:
    with open_llm(pooling_checkpoint("embed"), max_model_len=32) as llm:
        whole = {"prompt_token_ids": IDS[2][:32]}
        wanted = embed(llm, [IDS[2][:32]])[0]
        for side, kept in (("right", IDS[2][:32]), ("left", IDS[2][-32:])):
            cut = dataclasses.replace(RAW, truncate_prompt_tokens=-1, truncation_side=side)
            [found] = llm.embed([{"prompt_token_ids": IDS[2]}], cut, use_tqdm=False)
            assert found.prompt_token_ids == kept
            assert (found.outputs.embedding == wanted.tolist()) == (side == "right")
        assert llm.embed([whole], use_tqdm=False)[0].prompt_token_ids == IDS[2][:32]
        with pytest.raises(RequestError, match="has 33 tokens; the range is 1 to max_mod"):
            embed(llm, [IDS[2][:33]])
        with pytest.raises(RequestError, match="at most max_model_len = 32, or -1"):
            embed(llm, IDS, PoolingParams(truncate_prompt_tokens=33))


@pytest.mark.parametrize(
    ("first", "second", "max_len", "kept"),
    [
        (9, 4, 20, (9, 4)),
        (9, 4, 12, (5, 4)),
        (4, 9, 12, (4, 5)),
        (9, 8, 10, (4, 3)),
        (9, 9, 9, (3, 3)),
    ],
)
def test_longer_text_of_a_pair_is_truncated_first(
    first: int, second: int, max_len: int, kept: tuple[int, int]
) -> None:
    """Truncate like transformers' `longest_first`; the three special tokens stay."""
    parts, frame = [[1] * first, [2] * second], [[7], [8], [9]]
    found = joined(parts, frame, max_len, "right").token_ids
    assert found == [7, *[1] * kept[0], 8, *[2] * kept[1], 9]
