"""AsyncLLM with vLLM's parameters."""

import asyncio

import pytest

from quire.base.errors import ConfigError, RequestError
from quire.base.requests.lora_request import LoRARequest
from quire.vllm.arguments import AsyncEngineArgs
from quire.vllm.async_llm import AsyncLLM
from quire.vllm.logits_processors import LogitsProcessor
from quire.vllm.params import GuidedDecodingParams, SamplingParams


@pytest.mark.slow
def test_an_engine_made_from_arguments_answers() -> None:
    async def run() -> None:
        args = AsyncEngineArgs("demo", max_model_len=128, enforce_eager=True)
        engine = AsyncLLM.from_engine_args(args, usage_context="x")
        try:
            constraint = GuidedDecodingParams(choice=["yes"])
            params = SamplingParams(guided_decoding=constraint, extra_args={"unused": 1})
            async for output in engine.generate("Hi", params, request_id="a"):
                text = output.outputs[0].text
            assert text == "yes"
            with pytest.raises(RequestError, match="enable_lora"):
                adapter = LoRARequest("sql", 1, "adapters/sql")
                [_ async for _ in engine.generate("Hi", params, "b", lora_request=adapter)]
            assert engine.get_default_sampling_params().extra_args is None
            assert (await engine.get_tokenizer()).encode("Hi")
            with pytest.raises(AttributeError, match="quire has no AsyncLLM.start_profile"):
                await engine.start_profile()
        finally:
            engine.shutdown()

    asyncio.run(run())


def test_classes_cannot_go_to_another_process() -> None:
    for given in (LogitsProcessor, "module:Class"):
        with pytest.raises(ConfigError, match="the core is another process"):
            AsyncLLM("demo", logits_processors=[given])
    with pytest.raises(ConfigError, match="stat_loggers"):
        AsyncLLM.from_engine_args(AsyncEngineArgs("demo"), stat_loggers=[1])
