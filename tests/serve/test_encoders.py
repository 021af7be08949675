"""Encoders in `LLM`, compared with transformers: hidden states, embeddings, classes, and scores
of pairs.

Covers `models/encoders/bert.py`, `models/encoders/modernbert.py`, `spec/encoders.py`,
`ops/attention/within_step.py` and `ops/elementwise.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.base.errors import ConfigError, ModelError, RequestError
from quire.base.settings.config import config_from_flat
from quire.engine.recording.files import read_recording
from quire.models.checkpoint.source import resolve_source
from quire.ops.host.native import core
from quire.runner.setup.preview import preview_runner
from quire.spec.cache_group import STEP
from quire.spec.model_spec import load_spec
from quire.tools.devices import CPU, Device
from quire.tools.replay import replay_all
from quire.tools.sizing.fit import fit
from tests.support.cases import slow_but
from tests.support.models.checkpoints import random_tokens
from tests.support.models.encoder_checkpoints import (
    FAMILIES,
    MAX_LEN,
    encoder_checkpoint,
    inputs_of,
    is_near,
    logits_of,
    states_of,
)
from tests.support.models.pooling_checkpoints import with_modules
from tests.support.render.tiny_tokenizers import fresh_directory

IDS = [[2 + each for each in ids] for ids in random_tokens(23, 1, MAX_LEN, 2, 61, 40, 7)]
RAW = PoolingParams(use_activation=False)
TIGHT = {"max_num_batched_tokens": MAX_LEN, "max_num_seqs": 3}
TEXTS = ["a quick fox", "The lazy dog sleeps on, and the quick brown fox jumps over it.", "values"]
PAIRS = [
    ("a quick fox", "The dog."),
    ("Paged attention keeps keys", "values in blocks"),
    ("a", "b"),
]


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **({"disable_log_stats": True, "dtype": "float64"} | settings))


def pooled(llm: LLM, ids: list[list[int]]) -> list[np.ndarray]:
    outputs = llm.encode([{"prompt_token_ids": each} for each in ids], RAW, use_tqdm=False)
    return [each.outputs.data for each in outputs]


def of_ids(ids: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor([each])} for each in ids]


def changed(folder: Path, **fields: Any) -> Path:
    """Return a copy of a checkpoint with other fields in its config; None removes a field."""
    copy = fresh_directory()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


# ---- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES, "xlm-roberta", "modernbert"))
def test_hidden_states_match_transformers(family: str) -> None:
    """Prompts share steps, and the mean or the last token is pooled. A prompt that was split into
    chunks would give other values."""
    folder = encoder_checkpoint(family)
    states = states_of(folder, of_ids(IDS))
    for kind, taken in (("MEAN", lambda h: h.mean(0)), ("LAST", lambda h: h[-1])):
        config = {"seq_pooling_type": kind}
        with open_llm(folder, pooler_config=config, **TIGHT) as llm:
            is_near(pooled(llm, IDS), [taken(each) for each in states])
            assert {group.kind for group in llm.engine.spec.cache_groups} == {STEP}


@pytest.mark.parametrize("family", slow_but(FAMILIES, "bert", "modernbert"))
def test_classes_and_pair_scores_match_transformers(family: str) -> None:
    """Texts and pairs have the special tokens, and BERT's token types mark the second text."""
    folder = encoder_checkpoint(family, 3)
    wanted = logits_of(folder, inputs_of(folder, TEXTS))
    with open_llm(folder) as llm:
        is_near([e.outputs.data for e in llm.encode(TEXTS, RAW, use_tqdm=False)], wanted)
        found = llm.classify(TEXTS, use_tqdm=False)
        shares = [torch.from_numpy(each).softmax(0).numpy() for each in wanted]
        is_near([each.outputs.probs for each in found], shares)
    folder = encoder_checkpoint(family, 1)
    inputs = inputs_of(folder, PAIRS)
    wanted = [torch.from_numpy(each).sigmoid().numpy() for each in logits_of(folder, inputs)]
    with open_llm(folder) as llm:
        scores = llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)
    is_near([[each.outputs.score] for each in scores], wanted)
    ids = [each["input_ids"][0].tolist() for each in inputs]
    assert [each.prompt_token_ids for each in scores] == ids


def test_token_types_change_the_logits() -> None:
    folder = encoder_checkpoint("bert", 1)
    [inputs] = inputs_of(folder, PAIRS[:1])
    as_one = inputs | {"token_type_ids": torch.zeros_like(inputs["token_type_ids"])}
    one, two = logits_of(folder, [as_one, inputs])
    assert abs(one - two).max() > 1e-3


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"quantization": "int8"},
    ],
)
def test_batching_leaves_embeddings_bit_identical(
    family: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The C++ core computes each step in one call, for prompts alone and batched in two orders."""
    folder, mean = encoder_checkpoint(family), {"seq_pooling_type": "MEAN"}
    own = {"dtype": "float32"} | settings
    with open_llm(folder, pooler_config=mean, **own) as llm:
        alone = [pooled(llm, [each])[0] for each in IDS]
        together = [pooled(llm, IDS), pooled(llm, IDS[::-1])[::-1]]
    with open_llm(folder, pooler_config=mean, **own, **TIGHT) as llm:
        together.append(pooled(llm, IDS))
    assert "operation by operation" not in caplog.text
    for found in together:
        assert all(np.array_equal(one, other) for one, other in zip(found, alone, strict=True))
    bound = 1e-4 if own == {"dtype": "float32"} else 0.1
    states = [each.mean(0) for each in states_of(folder, of_ids(IDS))]
    for one, other in zip(alone, states, strict=True):
        assert np.linalg.norm(one - other) < bound * np.linalg.norm(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_core_gets_the_token_types_of_pairs(dtype: str) -> None:
    folder = encoder_checkpoint("bert", 1)
    wanted = logits_of(folder, inputs_of(folder, PAIRS))
    with open_llm(folder, dtype=dtype) as llm:
        found = llm.score(*map(list, zip(*PAIRS, strict=True)), RAW, use_tqdm=False)
    bound = 1e-4 if dtype == "float32" else 0.1  # some kernels round activations
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs.score == pytest.approx(other[0], abs=bound)


# ---- files -----------------------------------------------------------------------------------


def test_sentence_transformers_files_choose_the_pooling() -> None:
    """Without such files, the first token's state is pooled and normalised."""
    folder = encoder_checkpoint("bert")
    states = states_of(folder, inputs_of(folder, TEXTS))
    with open_llm(folder) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        wanted = [each[0] / np.linalg.norm(each[0]) for each in states]
        is_near([each.outputs.embedding for each in found], wanted)
        found = llm.embed(TEXTS, PoolingParams(dimensions=8), use_tqdm=False)
        is_near(
            [each.outputs.embedding for each in found],
            [each[0, :8] / np.linalg.norm(each[0, :8]) for each in states],
        )
    flags = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    with open_llm(with_modules(folder, ("Pooling", "1_Pooling", flags))) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        is_near([each.outputs.embedding for each in found], [each.mean(0) for each in states])


def test_cross_encoder_takes_its_activation_from_the_config_file() -> None:
    for num_labels in (1, 3):
        folder = changed(encoder_checkpoint("roberta", num_labels))
        content = {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
        }
        (folder / "config_sentence_transformers.json").write_text(json.dumps(content))
        logits = logits_of(folder, inputs_of(folder, PAIRS))
        with open_llm(folder) as llm:
            if num_labels == 1:
                found = llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)
                is_near([[each.outputs.score] for each in found], logits)
            else:
                found = llm.classify(TEXTS, use_tqdm=False)
                assert sum(found[0].outputs.probs) == pytest.approx(1, abs=1e-12)


def test_max_seq_length_is_the_default_max_model_len() -> None:
    folder = changed(encoder_checkpoint("bert"))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    wrong = pytest.raises(RequestError, match="the range is 1 to max_model_len = 12")
    with open_llm(folder) as llm, wrong:
        pooled(llm, IDS[:1])
    with open_llm(folder, max_model_len=MAX_LEN) as llm:
        assert len(pooled(llm, IDS)) == len(IDS)


def test_old_tensor_and_config_names_are_read() -> None:
    """The first BERTs' norms, extra tensors of a head, and the first configs of ModernBERT."""
    folder = changed(encoder_checkpoint("bert", 3), architectures=["BertForMaskedLM"])
    tensors = load_file(folder / "model.safetensors")
    old_names = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    renamed = {}
    for name, each in tensors.items():
        for new, old in old_names:
            name = name.replace(new, old)
        renamed[name] = each
    renamed |= {
        "cls.predictions.bias": torch.ones(3),
        "bert.embeddings.position_ids": torch.ones(3),
    }
    wanted = states_of(folder, of_ids(IDS))
    save_file(renamed, folder / "model.safetensors")
    with open_llm(folder) as llm:
        is_near(pooled(llm, IDS), [each[0] for each in wanted])
    old = changed(
        encoder_checkpoint("modernbert"),
        rope_parameters=None,
        layer_types=None,
        global_attn_every_n_layers=2,
        global_rope_theta=900.0,
        local_rope_theta=30.0,
        norm_eps=1e-3,
        classifier_pooling="mean",
    )
    with open_llm(old) as llm:
        is_near(pooled(llm, IDS), [each[0] for each in states_of(old, of_ids(IDS))])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("modernbert", {"classifier_pooling": "mean", "classifier_activation": "tanh"}),
        ("modernbert", {"classifier_bias": True, "norm_bias": True, "attention_bias": True}),
        ("modernbert", {"mlp_bias": True, "hidden_activation": "gelu_pytorch_tanh"}),
        ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-2, "type_vocab_size": 1}),
        ("roberta", {"hidden_act": "gelu_new", "pad_token_id": 4, "type_vocab_size": 2}),
    ],
)
def test_config_fields_have_the_same_effect_as_in_transformers(
    family: str, changes: dict[str, Any]
) -> None:
    own = tuple(item for item in changes.items() if item[0] != "pad_token_id")
    folder = changed(encoder_checkpoint(family, 3, own), **changes)
    ids = [[5 + each for each in prompt] for prompt in IDS if len(prompt) < MAX_LEN - 8]
    with open_llm(folder) as llm:
        is_near(pooled(llm, ids), logits_of(folder, of_ids(ids)))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("bert", {"is_decoder": True}, "is_decoder is true; models of type bert are encoders"),
        ("bert", {"position_embedding_type": "relative_key"}, "only absolute positions"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"classifier_pooling": "max"}, "it must be cls or mean"),
        ("modernbert", {"rope_parameters": {"rope_theta": 5.0}}, "it must stand under"),
        ("xlm-roberta", {"max_position_embeddings": 4}, "from 6"),
        ("bert", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ],
)
def test_unsupported_configs_are_rejected(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        open_llm(changed(encoder_checkpoint(family), **changes))


# ---- supported features and limits -----------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": 90}, "max_num_batched_tokens=90 is less than max_model_len=96"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold cuts prompts"),
        ({"kv_cache_dtype": "int8"}, "keeps no keys and values"),
        ({"runner": "generate"}, "runner is generate, but the tokens of this model see each"),
        ({"attention_backend": "triton"}, "attention_backend triton needs a KV cache"),
        ({"kv_disk_dir": "/nowhere"}, "cannot use blocks from a store"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config needs a model that"),
    ],
)
def test_settings_without_meaning_for_encoders_are_rejected(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_llm(encoder_checkpoint("bert"), **settings)


def test_token_classification_needs_runner_pooling() -> None:
    folder = changed(encoder_checkpoint("bert"), architectures=["BertForTokenClassification"])
    with pytest.raises(
        ConfigError, match="returns a result for each token, which quire does not support"
    ):
        open_llm(folder)
    with open_llm(folder, runner="pooling") as llm:
        assert len(pooled(llm, IDS)) == len(IDS)


def test_encoder_rejects_generation_and_overlong_prompts() -> None:
    with open_llm(encoder_checkpoint("roberta"), max_model_len="auto") as llm:
        assert llm.engine.client.max_model_len == MAX_LEN
        with pytest.raises(RequestError, match="this engine returns embeddings"):
            llm.generate("a", use_tqdm=False)
        with pytest.raises(RequestError, match="has 97 tokens; the range is 1 to max_mod"):
            pooled(llm, [[5] * (MAX_LEN + 1)])
        with pytest.raises(RequestError, match="is not in the vocabulary"):
            pooled(llm, [[5 + (1 << 30)]])
        cut = PoolingParams(truncate_prompt_tokens=4)
        [found] = llm.embed([TEXTS[1]], cut, use_tqdm=False)
        assert found.prompt_token_ids[0] == 0 and found.prompt_token_ids[-1] == 2
        assert len(found.prompt_token_ids) == 4


def test_encoder_has_no_block_pool_and_its_recording_replays(tmp_path: Path) -> None:
    folder = str(encoder_checkpoint("modernbert"))
    config = config_from_flat(model=folder, device="cpu")
    source = resolve_source(config.model)
    preview = preview_runner(config, source)
    assert preview.memory is not None and preview.memory.pool_bytes == 0
    assert preview.config.scheduler.max_num_batched_tokens == 256
    assert not fit(config, source, Device("cpu", CPU, 4 << 30)).warnings
    record = str(tmp_path / "record")
    with open_llm(Path(folder), record=record, **TIGHT) as llm:
        pooled(llm, IDS)
    assert replay_all(read_recording(tmp_path / "record")).difference is None


def test_layer_windows_match_transformers() -> None:
    windows = load_spec(encoder_checkpoint("modernbert")).layer_windows
    assert windows == (None, 6, 6, None, 6)
