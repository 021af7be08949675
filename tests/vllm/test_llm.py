"""LLM and LLMEngine with vLLM's parameters. Also covers `vllm/metrics.py`, `vllm/tokenizer.py`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.base.errors import ConfigError, RequestError
from quire.base.requests.lora_request import LoRARequest
from quire.base.requests.outputs import PoolingRequestOutput
from quire.base.requests.sampling_params import RequestOutputKind
from quire.engine.drafting.draft_pace import StepTimes
from quire.vllm.arguments import EngineArgs
from quire.vllm.llm import LLM, LLMEngine
from quire.vllm.logits_processors import AdapterLogitsProcessor
from quire.vllm.metrics import Counter, Gauge, Histogram, Vector
from quire.vllm.params import PoolingParams, SamplingParams
from quire.vllm.tokenizer import get_tokenizer
from tests.support.models.pooling_checkpoints import pooling_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=4)
HI = [{"role": "user", "content": "Hi"}]


class Only(AdapterLogitsProcessor):
    """Allows only the token that a request names."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        token = (params.extra_args or {}).get("only")
        if token is None:
            return None

        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            allowed = torch.full_like(logits, -torch.inf)
            allowed[token] = 0
            return allowed

        return process


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"trust_remote_code": None, "quantization": None}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(
        "demo", max_model_len=256, max_num_seqs=8, logits_processors=[Only],
        speculative_config=drafts, **settings,
    ) as made:  # fmt: skip
        yield made


def test_processors_change_only_the_requests_that_name_a_token(llm: LLM) -> None:
    named = SamplingParams(n=2, max_tokens=3, extra_args={"only": 9})
    first, second = llm.generate(["Once upon", "Once upon"], [named, GREEDY], use_tqdm=False)
    assert [each.token_ids for each in first.outputs] == [[9] * 3] * 2
    assert 9 not in second.outputs[0].token_ids
    [answer] = llm.chat(HI, named, use_tqdm=False)
    assert answer.outputs[0].token_ids == [9] * 3
    assert llm.generate("Once", use_tqdm=False)[0].outputs


def test_what_is_refused_has_a_reason(llm: LLM) -> None:
    adapter = LoRARequest("sql", 1, "path")
    for call in (llm.embed, llm.classify, llm.encode):
        with pytest.raises(RequestError, match="adapters are for models that generate"):
            call(HI, lora_request=adapter)
    with pytest.raises(RequestError, match="enable_lora"):
        llm.generate("Hi", lora_request=adapter)
    with pytest.raises(RequestError, match="tokenization_kwargs"):
        llm.generate("a", GREEDY, tokenization_kwargs={"truncation": True})
    with pytest.raises(AttributeError, match="quire has no LLM.enqueue: call generate"):
        llm.enqueue([])
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = llm.nonsense


def test_the_models_own_parameters_take_vllms_fields(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.extra_args = 2, {"only": 7}
    assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids == [7, 7]
    assert llm.reset_prefix_cache() is True


def test_metrics_have_vllms_names(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "seconds", lambda *_: None)  # drafts do not depend on times
    before = {each.name: each for each in llm.get_metrics()}
    ids = llm.get_tokenizer().encode("The fox ran. The fox ran. The fox ran. The fox")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for _ in range(5):  # a rest from earlier tests may last
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        if any(each.name.endswith("per_pos") for each in llm.get_metrics()):
            break
    found = {each.name: each for each in llm.get_metrics()}
    counted = found["vllm:generation_tokens"]
    assert isinstance(counted, Counter) and counted.labels["model_name"] == "demo"
    old = before["vllm:generation_tokens"]
    assert isinstance(old, Counter) and counted.value >= old.value + 64
    assert isinstance(found["vllm:kv_cache_usage_perc"], Gauge)
    times = found["vllm:time_to_first_token_seconds"]
    assert isinstance(times, Histogram) and times.count == times.buckets["+Inf"] > 0
    drafts, accepted = (
        found["vllm:spec_decode_num_drafts"],
        found["vllm:spec_decode_num_accepted_tokens_per_pos"],
    )
    assert isinstance(drafts, Counter) and drafts.value > 0
    assert isinstance(accepted, Vector) and len(accepted.values) >= 1
    assert all(name.startswith("vllm:") for name in found)


def test_a_tokenizer_renders_conversations(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(HI, add_generation_prompt=True)
    assert "Hi" in text and tokenizer.decode(ids) == text
    [first, second] = tokenizer.apply_chat_template([HI, HI], add_generation_prompt=True)
    assert first == second == ids
    [output] = llm.chat(HI, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids
    assert tokenizer("Once").input_ids == tokenizer.encode("Once")
    assert tokenizer(["Once", "a"])["input_ids"][0] == tokenizer.encode("Once")
    assert tokenizer.batch_decode([ids]) == [text] and tokenizer.decode(ids[0])
    token = tokenizer.convert_ids_to_tokens(ids[-1])
    assert tokenizer.convert_tokens_to_ids([token]) == [ids[-1]]
    assert tokenizer.get_vocab()[token] == ids[-1] and len(tokenizer) == tokenizer.vocab_size
    assert tokenizer.eos_token_id in tokenizer.all_special_ids
    assert tokenizer.eos_token == tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
    assert get_tokenizer("demo", tokenizer_mode="auto").encode("Once") == tokenizer.encode("Once")
    with pytest.raises(AttributeError):
        _ = tokenizer.nonsense


def outputs_of(engine: LLMEngine) -> list[Any]:
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
    return found


def test_an_engine_takes_requests_while_it_steps(llm: LLM) -> None:
    engine = llm.llm_engine
    [expected] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert engine.add_request("a", "Once upon a time", GREEDY) == "a"
    assert engine.get_num_unfinished_requests() == 1
    first = engine.step()
    final = GREEDY.clone()
    final.output_kind = RequestOutputKind.FINAL_ONLY
    engine.add_request("b", {"prompt_token_ids": expected.prompt_token_ids}, final, priority=1)
    engine.add_request("c", "Once", SamplingParams(max_tokens=100, ignore_eos=True))
    engine.abort_request(["c", "unknown"])
    outputs = first + outputs_of(engine)
    texts = [each.outputs[0].text for each in outputs if each.request_id == "a"]
    assert texts[-1] == expected.outputs[0].text and texts == sorted(texts, key=len)
    [b] = [each for each in outputs if each.request_id == "b"]
    assert b.outputs[0].token_ids == expected.outputs[0].token_ids
    assert not any(each.request_id == "c" for each in outputs)


def test_an_engine_refuses_what_llm_refuses(llm: LLM) -> None:
    engine = llm.llm_engine
    with pytest.raises(RequestError, match="enable_lora"):
        engine.add_request("a", "Hi", GREEDY, lora_request=LoRARequest("sql", 1, "adapters/sql"))
    with pytest.raises(RequestError, match="tokenization_kwargs"):
        engine.add_request("a", "Hi", GREEDY, tokenization_kwargs={"a": 1})
    with pytest.raises(RequestError, match="generates text"):
        engine.add_request("a", "Hi", PoolingParams())
    with pytest.raises(AttributeError, match="quire has no LLMEngine.engine_core"):
        _ = engine.engine_core
    with pytest.raises(ConfigError, match="stat_loggers"):
        LLMEngine.from_engine_args(EngineArgs("demo"), stat_loggers=[1])
    assert not engine.has_unfinished_requests()
    assert engine.get_model_config().max_model_len == 256
    assert engine.vllm_config.scheduler_config.max_num_seqs == 8
    assert engine.get_tokenizer().encode("a") == engine.tokenizer.encode("a")


def test_an_engine_pools() -> None:
    path = str(pooling_checkpoint("embed"))
    engine = LLMEngine.from_engine_args(EngineArgs(path, disable_log_stats=True))
    engine.add_request("a", "Hello", PoolingParams(task="embed"))
    [output] = outputs_of(engine)
    assert isinstance(output, PoolingRequestOutput) and output.request_id == "a"
    engine.add_request("b", "Hello", PoolingParams(dimensions=3))
    [output] = outputs_of(engine)
    assert output.outputs.data.shape == (3,)
    with pytest.raises(ConfigError, match="disable_log_stats"):
        engine.get_metrics()
    engine.close()
