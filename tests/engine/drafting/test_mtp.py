"""Layers for multi-token prediction as drafters of whole engines. Draft tokens follow the
definition, whatever the scheduler does. Answers do not change."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import ModelError
from quire.base.events import Stepped
from quire.base.requests.outputs import RequestOutput
from quire.base.settings.config import config_from_flat
from quire.engine.drafting.draft_pace import StepTimes
from quire.models.checkpoint.source import resolve_model
from quire.tools.devices import Device
from quire.tools.sizing.fit import fit
from tests.engine.drafting.test_eagle3 import drafts_of
from tests.support.cases import slow_but
from tests.support.engine.scenarios import answers_of
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.draft_heads import MtpByDefinition, write_exact_mtp, write_mtp
from tests.support.render.tiny_tokenizers import write_directory

# By model type: bytes of KV memory that are too few for three requests.
SHORT = {"deepseek_v3": 61_000, "qwen3_next": 80_000, "qwen3_5": 100_000, "glm4_moe": 136_000}
VARIANTS = tuple(SHORT)
PROMPTS = random_tokens(41, 44, 3)
PROMPTS[1][:37] = PROMPTS[0][:37]
NUM = 3


def engine(directory: Path, num: int = NUM, **settings: Any) -> LLM:
    """num: draft tokens; 0 for an engine without drafts."""
    if num:
        method = {"method": "mtp", "num_speculative_tokens": num}
        settings = {"speculative_config": method} | settings
    return LLM(
        str(directory), max_model_len=128, disable_log_stats=True,
        **({"kv_cache_memory_bytes": 4 << 20, "dtype": "float32", "block_size": 4} | settings),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no steps, so that every step gets drafts."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


def run(llm: LLM, **params: Any) -> list[RequestOutput]:
    given = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "detokenize": False} | params
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    return llm.generate(prompts, SamplingParams(**given), use_tqdm=False)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 8},
        pytest.param({"max_num_seqs": 3}, marks=pytest.mark.slow),
    ],
    ids=["whole", "chunks", "short"],
)
@pytest.mark.parametrize("variant", slow_but(VARIANTS, "deepseek_v3"))
@torch.inference_mode()
def test_drafts_match_the_definition(
    variant: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the second run, where prompts are prefix hits."""
    by_definition = MtpByDefinition(write_mtp(tmp_path, variant))
    if "max_num_seqs" in settings:
        settings = settings | {"kv_cache_memory_bytes": SHORT[variant]}
    with engine(tmp_path, **settings) as llm:
        drafts = drafts_of(llm, monkeypatch)
        outputs = run(llm) + run(llm)
    assert len(drafts) > 40
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 16
    if "max_num_seqs" in settings:
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
    tokens_of = {
        output.request_id: [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]
        for output in outputs
    }
    for draft in drafts[:: len(drafts) // 10]:
        known = tokens_of[draft.request_id][: draft.num_known]
        read_TD = by_definition.states(known)[:-1]
        assert draft.token_ids == by_definition.drafts(known, read_TD, len(draft.token_ids) - 1)[0]


@pytest.mark.parametrize("variant", slow_but(VARIANTS, "qwen3_next"))
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"quantization": "int8"},
        pytest.param({"quantization": "int4"}, marks=pytest.mark.slow),
    ],
    ids=lambda how: next(iter(how.values())),
)
def test_mtp_drafts_do_not_change_answers(
    variant: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, with sampled tokens and two answers to each prompt."""
    write_mtp(tmp_path, variant)
    found = []
    for num in (0, NUM):
        with engine(tmp_path, num, **how) as llm:
            steps: list[Stepped] = []
            core = llm.engine.client.core
            core.subscribe(lambda e, to=steps: to.append(e) if isinstance(e, Stepped) else None)
            outputs = run(llm, temperature=0.8, seed=5, n=2, logprobs=2)
        found.append([(c.token_ids, c.logprobs) for o in outputs for c in o.outputs])
    assert found[0] == found[1]
    assert sum(s.num_draft_tokens for s in steps) > 0


@pytest.fixture(scope="module", params=("deepseek_v3", "qwen3_next"))
def with_text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    directory = write_directory(tmp_path_factory.mktemp("text"), "byte_level")
    write_mtp(directory, request.param, vocab_size=424)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", (1, 2))
def test_drafts_do_not_change_answers_with_any_sampling(num_ranks: int, with_text: Path) -> None:
    """Also with grammars, beams and prefix hits, and on two ranks that share all layers."""
    method = f'{{"method": "mtp", "num_speculative_tokens": {NUM}}}'
    plain = answers_of(with_text, 300, speculative_config='{"method": "none"}')
    found = answers_of(with_text, 300, speculative_config=method, tensor_parallel_size=num_ranks)
    assert found.answers == plain.answers
    assert found.num_draft_tokens > 20 and found.num_masked > 0


@pytest.mark.parametrize("variant", ["deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_layer_gets_all_its_drafts_accepted(
    variant: str, temperature: float, tmp_path: Path
) -> None:
    """No layer adds to the residual stream, so each token depends only on the token before."""
    write_exact_mtp(tmp_path, variant)
    with engine(tmp_path) as llm:
        outputs = run(llm, temperature=temperature, seed=4, max_tokens=33)
    for output in outputs:
        assert output.metrics is not None
        assert output.metrics.num_accepted_draft_tokens == output.metrics.num_draft_tokens >= 24


def test_layer_is_loaded_only_for_the_mtp_method(tmp_path: Path) -> None:
    write_mtp(tmp_path / "with", "deepseek_v3")
    write_checkpoint(tmp_path / "without", "deepseek_v3")
    loaded = []
    for name, num in (("with", 0), ("without", 0), ("with", 1)):
        method = '{"method": "mtp"}' if num else None
        config = config_from_flat(model=str(tmp_path / name), speculative_config=method)
        found = fit(config, resolve_model(str(tmp_path / name)), Device("a CPU", "cpu", 4 << 30))
        loaded.append(sum(each.num_bytes for each in found.weights))
    assert loaded[0] == loaded[1] < loaded[2]


def test_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match="quire runs none of models of type llama.*ngram"):
        engine(tmp_path / "llama")
    write_checkpoint(tmp_path / "deepseek", "deepseek_v3")
    with pytest.raises(ModelError, match=r"no tensor .* begins with model\.layers\.3\."):
        engine(tmp_path / "deepseek")
