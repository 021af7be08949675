"""`AsyncLLM` with vLLM's further parameters."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from quire.base.errors import ConfigError
from quire.base.requests import sampling_params as quire_params
from quire.base.requests.outputs import RequestOutput
from quire.serve.python import async_llm
from quire.vllm.arguments import EngineArgs
from quire.vllm.params import SamplingParams, absent
from quire.vllm.tokenizer import ChatTokenizer

# Methods of vLLM's that quire does not have, and what to do instead.
REFUSED = {
    "add_lora": "give lora_request with a request, which loads the adapter",
    "add_request": "iterate over generate, one task for each request",
    "collective_rpc": "the model runs in quire's own processes; see docs/operate/parallel.md",
    "start_profile": "use `quire trace` (docs/operate/recording.md)",
    "stop_profile": "use `quire trace` (docs/operate/recording.md)",
}


class AsyncLLM(async_llm.AsyncLLM):
    """quire's AsyncLLM, which also takes settings that are None. Its core is another process, which
    cannot receive classes of logits processors."""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        processors = given.get("logits_processors", ())
        if any(not isinstance(each, str) or ":" in each for each in processors):
            raise ConfigError(
                "logits_processors: the core is another process, which cannot get a class; use LLM,"
                " or install a package (docs/extend/logits-processors.md) and give its name."
            )
        super().__init__(model, **given)

    @classmethod
    def from_engine_args(  # type: ignore[override]
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
        **ignored: Any,
    ) -> "AsyncLLM":
        """Create an engine from its settings. The other parameters change nothing, except
        stat_loggers, which are refused by ConfigError."""
        if stat_loggers is not None:
            raise ConfigError("stat_loggers are not supported; remove them.")
        return cls(**engine_args.given())

    async def generate(
        self,
        prompt: Any,
        sampling_params: quire_params.SamplingParams | None = None,
        request_id: str | None = None,
        **known: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt; see quire's AsyncLLM."""
        params = sampling_params
        if isinstance(params, SamplingParams):
            params = params.to_quire()
        async with aclosing(super().generate(prompt, params, request_id, **known)) as outputs:
            async for output in outputs:
                yield output

    async def get_tokenizer(self) -> ChatTokenizer:  # type: ignore[override]
        """Return the tokenizer with the methods of transformers' tokenizers."""
        return ChatTokenizer(self._text.renderer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's sampling parameters, with vLLM's further fields."""
        found = super().get_default_sampling_params()
        return SamplingParams(**{name: getattr(found, name) for name in found.__struct_fields__})

    async def do_log_stats(self) -> None:
        """Do nothing: the log has the statistics."""

    def __getattr__(self, name: str) -> Any:
        raise absent("AsyncLLM", name, REFUSED)
