"""`LLM` with vLLM's further parameters and methods, and `LLMEngine`, which a script steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.base.messages import Request
from quire.base.requests import pooling_params
from quire.base.requests import sampling_params as quire_params
from quire.base.requests.lora_request import LoRARequest
from quire.base.requests.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.base.requests.pooling_params import TASK_NAMES, needed_task
from quire.base.settings.config import ModelConfig
from quire.engine.client.admission import admit, checked_grammar
from quire.engine.client.request_maker import RequestMaker
from quire.render.pooling_prompts import to_pool
from quire.render.renderer import Messages, Prompt, RenderedPrompt
from quire.render.truncation import truncated_for
from quire.serve.media.local_media import LocalMedia
from quire.serve.python import llm as quire_llm
from quire.serve.python.beam_search import BeamSearchOutput
from quire.serve.python.pooling import numbers_of, parts_of, salt_of
from quire.vllm.arguments import EngineArgs
from quire.vllm.configs import VllmConfig
from quire.vllm.logits_processors import load_processors, processors_for
from quire.vllm.metrics import Metric, MetricsReader
from quire.vllm.params import SamplingParams, absent, refuse_adapter
from quire.vllm.tokenizer import ChatTokenizer

Params = quire_params.SamplingParams | Sequence[quire_params.SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
OneParams = quire_params.SamplingParams | pooling_params.PoolingParams
# Methods of vLLM's that quire does not have, and what to do instead.
REFUSED = {
    "apply_model": "quire's models are not modules of vLLM; see docs/extend/models.md",
    "collective_rpc": "the model runs in quire's own processes; see docs/operate/parallel.md",
    "enqueue": "call generate with all prompts, or use LLMEngine",
    "reward": "use score or classify",
    "start_profile": "use `quire trace` (docs/operate/recording.md) or torch.profiler",
    "stop_profile": "use `quire trace` (docs/operate/recording.md) or torch.profiler",
}
REFUSED_OF_ENGINE = {
    "add_lora": "give lora_request with a request, which loads the adapter",
    "collective_rpc": REFUSED["collective_rpc"],
    "engine_core": "quire's own core is `llm.engine` (docs/inside/overview.md)",
    "model_executor": "quire's own core is `llm.engine` (docs/inside/overview.md)",
}


class LLM(quire_llm.LLM):
    """quire's LLM, which also takes batch-level logits processors, and settings that are None or
    configuration objects."""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        given = {name: _plain(value) for name, value in settings.items() if value is not None}
        processors = given.pop("logits_processors", ())
        is_name = [isinstance(each, str) and ":" not in each for each in processors]
        pairs = list(zip(processors, is_name, strict=True))
        self._kinds = load_processors([each for each, is_named in pairs if not is_named])
        names = tuple(each for each, is_named in pairs if is_named)
        super().__init__(model, logits_processors=names, **given)
        # Parameters of LLMEngine's requests to a pooling model, by id, until their outputs
        self.pooling: dict[str, pooling_params.PoolingParams] = {}
        self._metrics: MetricsReader | None = None
        if not self._alive.config.disable_log_stats and not self._has_processes:
            self._metrics = MetricsReader(self.engine)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Create an LLM from its settings as an object."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: Any = True,
        priority: Sequence[int] | None = None,
        *,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; see quire's LLM."""
        _refuse_tokenization(tokenization_kwargs)
        params = self._quires(sampling_params)
        return super().generate(
            prompts, params, bool(use_tqdm), priority, lora_request=lora_request
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: Any = True,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer each conversation; see quire's LLM."""
        return super().chat(
            messages,
            self._quires(sampling_params),
            bool(use_tqdm),
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            lora_request=lora_request,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Any,
        use_tqdm: Any = False,
        *,
        lora_request: Adapters = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for each prompt; see quire's LLM. concurrency_limit: ignored, because the
        scheduler runs as many beams as fit."""
        return super().beam_search(prompts, params, bool(use_tqdm), lora_request=lora_request)

    def embed(
        self,
        prompts: Any,
        pooling_params: Any = None,
        use_tqdm: Any = True,
        *,
        lora_request: Any = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt; see quire's LLM."""
        refuse_adapter(lora_request)
        return super().embed(prompts, pooling_params, bool(use_tqdm))

    def classify(
        self,
        prompts: Any,
        pooling_params: Any = None,
        use_tqdm: Any = True,
        *,
        lora_request: Any = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's classes; see quire's LLM."""
        refuse_adapter(lora_request)
        return super().classify(prompts, pooling_params, bool(use_tqdm))

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        use_tqdm: Any = True,
        pooling_task: str | None = None,
        *,
        lora_request: Any = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled output of each prompt; see quire's LLM."""
        refuse_adapter(lora_request)
        return super().encode(prompts, pooling_params, bool(use_tqdm), pooling_task)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        pooling_params: Any = None,
        use_tqdm: Any = True,
        *,
        lora_request: Any = None,
    ) -> list[ScoringRequestOutput]:
        """Return scores of pairs of texts; see quire's LLM."""
        refuse_adapter(lora_request)
        return super().score(data_1, data_2, pooling_params, bool(use_tqdm))

    def get_tokenizer(self) -> ChatTokenizer:  # type: ignore[override]
        """Return the tokenizer with the methods of transformers' tokenizers."""
        return ChatTokenizer(self._alive.renderer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's sampling parameters, with vLLM's further fields."""
        found = super().get_default_sampling_params()
        return SamplingParams(**{name: getattr(found, name) for name in found.__struct_fields__})

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Stop using all blocks cached so far. The parameters change nothing: running requests
        keep their blocks, and blocks in stores are not used either."""
        return super().reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics. Raises ConfigError if they are off, or if the cores are
        processes."""
        if self._metrics is None:
            raise ConfigError(
                "get_metrics needs an engine in this process that counts: remove"
                " disable_log_stats and data_parallel_size."
            )
        return self._metrics.read()

    @property
    def llm_engine(self) -> "LLMEngine":
        """The engine, to add requests one by one. Raises ConfigError if cores are processes."""
        return LLMEngine(self)

    def quire_params(self, params: quire_params.SamplingParams) -> quire_params.SamplingParams:
        """Return a request's parameters with the logits processors of this engine."""
        if not isinstance(params, SamplingParams):
            return params
        if not self._kinds:
            return params.to_quire()
        config = VllmConfig.of(self._alive.config)
        return params.to_quire(processors_for(self._kinds, config, params))

    def __getattr__(self, name: str) -> Any:
        raise absent("LLM", name, REFUSED)

    @property
    def _has_processes(self) -> bool:
        return self._alive.config.parallel.data_parallel_size > 1

    def _quires(self, given: Params) -> Params:
        if given is None or isinstance(given, quire_params.SamplingParams):
            if given is None and self._kinds:
                given = self.get_default_sampling_params()
            return None if given is None else self.quire_params(given)
        return [self.quire_params(each) for each in given]


def _plain(value: Any) -> Any:
    """Return a setting as quire takes it: a dictionary for an object with fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, set | frozenset) else value


def _refuse_tokenization(given: dict[str, Any] | None) -> None:
    if given:
        raise RequestError(
            f"tokenization_kwargs={given!r} is not supported; use truncate_prompt_tokens of"
            " SamplingParams, or token ids.",
            "tokenization_kwargs",
        )


class LLMEngine:
    """The engine of an LLM in this process. Raises ConfigError if its cores are processes.

    Each output has all text so far, only the new text, or everything at the end, as the
    `output_kind` of the request's parameters says."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._media = LocalMedia(self._engine.renderer)
        self._pooling = llm.pooling

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> "LLMEngine":
        """Create an engine from its settings. usage_context and enable_multiprocessing change
        nothing. Raises ConfigError for stat_loggers."""
        if stat_loggers is not None:
            raise ConfigError("stat_loggers are not supported; read get_metrics() instead.")
        return cls(LLM(**engine_args.given()))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | Messages,
        params: OneParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request; return its id. Raises RequestError if it cannot be served.

        arrival_time, trace_headers: ignored."""
        if tokenization_kwargs:
            raise RequestError("tokenization_kwargs is not supported; use token ids.")
        if isinstance(params, quire_params.SamplingParams):
            [maker] = self._llm.makers(lora_request, 1)
            rendered, request = self._to_generate(request_id, prompt, params, priority, maker)
        else:
            refuse_adapter(lora_request)
            rendered, request = self._to_pool(request_id, prompt, params, priority)
        self._engine.client.add(request, rendered.text)
        if isinstance(params, pooling_params.PoolingParams):
            self._pooling[request_id] = params
        return request_id

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Run one step; return the outputs that it finished or extended."""
        return [self._output(each) for each in self._engine.client.step()]

    def has_unfinished_requests(self) -> bool:
        return self._engine.client.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self._engine.client.num_unfinished

    def abort_request(self, request_ids: str | Sequence[str], internal: bool = False) -> None:
        """End requests without further outputs. Unknown ids are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._engine.client.abort(names)
        for name in names:
            self._pooling.pop(name, None)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """See LLM.reset_prefix_cache."""
        return self._llm.reset_prefix_cache(reset_running_requests, reset_connector)

    def get_metrics(self) -> list[Metric]:
        """See LLM.get_metrics."""
        return self._llm.get_metrics()

    def get_tokenizer(self) -> ChatTokenizer:
        return self._llm.get_tokenizer()

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._llm.get_tokenizer()

    @property
    def vllm_config(self) -> VllmConfig:
        return VllmConfig.of(self._engine.config)

    @property
    def model_config(self) -> ModelConfig:
        return self._engine.config.model

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def close(self) -> None:
        """Free the model and its memory."""
        self._llm.close()

    def do_log_stats(self) -> None:
        """Do nothing: the log has the statistics."""

    def __getattr__(self, name: str) -> Any:
        raise absent("LLMEngine", name, REFUSED_OF_ENGINE)

    def _to_generate(
        self,
        request_id: str,
        prompt: Prompt | Messages,
        params: quire_params.SamplingParams,
        priority: int,
        maker: RequestMaker,
    ) -> tuple[RenderedPrompt, Request]:
        engine = self._engine
        params = self._llm.quire_params(params)
        plain, media = self._media.take(prompt)
        rendered = engine.renderer.render(plain, media=media)
        rendered = truncated_for(params, rendered, engine.client.max_model_len)
        grammar = checked_grammar(engine.renderer, params, rendered)
        salt = salt_of(prompt)
        made = maker.make(rendered, params, request_id, salt, priority, grammar=grammar)
        return rendered, admit(engine.client, made)

    def _to_pool(
        self,
        request_id: str,
        prompt: Any,
        params: pooling_params.PoolingParams,
        priority: int,
    ) -> tuple[RenderedPrompt, Request]:
        engine = self._engine
        needed_task(engine.spec.pooling, *TASK_NAMES)
        rendered = to_pool(engine.renderer, [prompt], params, engine.client.max_model_len)
        made = engine.requests.make_pooling(rendered, request_id, salt_of(prompt), priority)
        return rendered, admit(engine.client, made)

    def _output(self, output: RequestOutput) -> RequestOutput | PoolingRequestOutput:
        spec, params = self._engine.spec.pooling, self._pooling.pop(output.request_id, None)
        if spec is None or params is None:
            return output
        numbers = numbers_of(output, spec, params)
        return PoolingRequestOutput(*parts_of(output, PoolingOutput(numbers)))
