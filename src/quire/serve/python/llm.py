"""`LLM`: generation from a model's name and prompts (T 4.2.1), with vLLM's offline interface."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.base.errors import STEP_FAILED, ConfigError, RequestError, StepFailed
from quire.base.messages import SLEEPING_PARTS, PinnedPrefix, Request
from quire.base.requests.lora_request import LoRARequest
from quire.base.requests.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.base.requests.pooling_params import PoolingParams
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import config_from_flat
from quire.engine.client.adapters import AdapterMakers
from quire.engine.client.admission import admit, checked_grammar
from quire.engine.client.async_client import checked_level, is_aborting
from quire.engine.client.request_maker import RequestMaker
from quire.engine.start.build import Engine, build_engine
from quire.models.load.weight_files import weight_files
from quire.render.answers.format import AnswerFormat
from quire.render.media.parts import refuse_media
from quire.render.renderer import Messages, Prompt, RenderedPrompt, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.truncation import truncated_for
from quire.serve.hooks.hooks import TIMEOUT_S, Hooks
from quire.serve.media.local_media import LocalMedia
from quire.serve.processes.core_processes import ProcessEngine, start_engine
from quire.serve.processes.progress import LoadBar, RequestBar
from quire.serve.python.beam_search import BeamSearchOutput, BeamSearchParams
from quire.serve.python.local_hooks import LocalHooks, LocalRequest
from quire.serve.python.pooling import Pooling, salt_of
from quire.serve.python.session import Session
from quire.serve.python.session_tokens import KEEP_S
from quire.serve.vllm_compat import drop_vllm_settings


class LLM:
    """An engine in this process; with data_parallel_size above 1, in as many processes.

        with LLM("demo") as llm:
            for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    model: directory, Hugging Face id, `demo`, or a named shape with random weights
    (`shape:qwen3-0.6b`). settings: the fields of the dataclasses in `quire.base.settings.config`.
    hooks: names or objects that process prompts and outputs in this order (base/requests/hooks.py).
    hook_timeout: seconds for one call of a hook. allowed_local_media_path: folder of images that
    prompts may name by path. allowed_media_domains: hosts that images may be downloaded from. Not
    thread-safe.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        hooks: Sequence[Any] = (),
        hook_timeout: float = TIMEOUT_S,
        allowed_local_media_path: str = "",
        allowed_media_domains: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        made = Hooks(hooks, hook_timeout) if hooks else None
        drop_vllm_settings(settings)
        settings.pop("limit_mm_per_prompt", None)  # the program controls this itself
        config = config_from_flat(model=model, **settings)
        self._streams: dict[str, deque[RequestOutput]] = {}  # unread outputs by request id
        with LoadBar(enabled=not config.disable_log_stats) as bar:
            self._engine: Engine | ProcessEngine | None = None
            if config.parallel.data_parallel_size > 1:
                self._engine = start_engine(config)
            else:
                self._engine = build_engine(config, bar.update)
        self._adapters = AdapterMakers(config.lora.usable_rank)
        self._hooks = None if made is None else LocalHooks(made, self._engine)
        self._media = LocalMedia(
            self._engine.renderer, allowed_local_media_path, allowed_media_domains
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return outputs in the order of the prompts.

        Args:
            prompts: a text, {"prompt": text}, {"prompt_token_ids": ids}, token ids, or a list of
                these. Dictionaries may contain a "cache_salt", and images or videos as
                "multi_modal_data", for each of which the prompt has the model's placeholder once.
            sampling_params: one for all prompts, or one each; the model's defaults if absent
            lora_request: adapter of all prompts, or one each, None for the base model

        With n above 1 each output has n continuations. Raises RequestError before any request runs
        if one of them cannot be served.
        """
        renderer = self._alive.renderer
        listed, media = self._media.take_all(_as_list(prompts))
        listed, hooked = self._admitted(listed, sampling_params)
        pairs = zip(listed, media, strict=True)
        rendered = [renderer.render(prompt, media=each) for prompt, each in pairs]
        salts = list(map(salt_of, listed))
        makers = self.makers(lora_request, len(rendered))
        return self._run(rendered, sampling_params, salts, priority, use_tqdm, hooked, makers)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations.

        Contents may have images as parts: {"type": "image_url", "image_url": {"url": ...}} with a
        data: URL or an allowed file or host, or {"type": "image_pil", "image_pil": picture}.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            content_format=chat_template_content_format,
            template_kwargs=chat_template_kwargs or {},
        )
        if not messages:
            raise RequestError("messages is empty; give at least one message.", "messages")
        single = isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        conversations, media = self._media.take_all(conversations)
        conversations, hooked = self._admitted(conversations, sampling_params, options)
        renderer = self._alive.renderer
        pairs = zip(conversations, media, strict=True)
        rendered = [renderer.render(c, options, chat_template, media=each) for c, each in pairs]
        salts = [""] * len(rendered)
        form = renderer.answer_format(chat_template, bool(tools))
        makers = self.makers(lora_request, len(rendered))
        return self._run(rendered, sampling_params, salts, None, use_tqdm, hooked, makers, form)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most probable continuations of each prompt, best first."""
        listed = _as_list(prompts)
        for prompt in listed:
            refuse_media(prompt, "beam search")
        sampling = [each.sampling_params() for each in _each(params, len(listed), "params")]
        outputs = self.generate(listed, sampling, use_tqdm, lora_request=lora_request)
        return [BeamSearchOutput.of(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt. Needs an embedding model."""
        return self._pooling(use_tqdm).embed(self._seen(prompts), pooling_params or PoolingParams())

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's classes. Needs a classification model."""
        params = pooling_params or PoolingParams()
        return self._pooling(use_tqdm).classify(self._seen(prompts), params)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled output of each prompt as a numpy array. pooling_task: embed or
        classify, checked against the model."""
        params = pooling_params or PoolingParams()
        return self._pooling(use_tqdm).encode(self._seen(prompts), params, pooling_task)

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return scores for one text with each of data_2, or for pairs of texts. A score is the
        cosine of their embeddings, or the output of a model with one class."""
        params = pooling_params or PoolingParams()
        return self._pooling(use_tqdm).score(self._seen(data_1), self._seen(data_2), params)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        options: ChatOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, or answer one conversation, and yield the output as it is generated.

        Each output contains new tokens only. With n above 1 it covers the continuations with new
        tokens, each with its index. Leaving the iterator early ends the request.
        """
        engine = self._alive
        params = (sampling_params or self.get_default_sampling_params()).clone()
        params.output_kind = RequestOutputKind.DELTA
        prompt, media = self._media.take(prompt)
        [prompt], hooked = self._admitted([prompt], params, options)
        rendered = engine.renderer.render(prompt, options, media=media)
        rendered = truncated_for(params, rendered, engine.client.max_model_len)
        name = hooked[0].request_id if hooked else None
        is_chat = is_conversation(prompt)
        form = engine.renderer.answer_format() if is_chat else None
        grammar = checked_grammar(engine.renderer, params, rendered, form)
        priority, salt = hooked[0].priority(0) if hooked else 0, salt_of(prompt)
        [maker] = self.makers(lora_request, 1)
        made = maker.make(rendered, params, name, salt, priority, grammar=grammar)
        request = admit(engine.client, made)
        engine.client.add(request, rendered.text)
        mine = self._streams[request.request_id] = deque[RequestOutput]()
        finished = False
        try:
            while not finished:
                while not mine:
                    self._step()
                output = mine.popleft()
                if hooked:
                    output = hooked[0].take(output)
                    hooked[0].act(engine.client)
                    if hooked[0].has_ended:
                        engine.client.abort([request.request_id])
                finished = output.finished
                yield output
        finally:
            del self._streams[request.request_id]
            if not finished:
                engine.client.abort([request.request_id])

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise RequestError if the model has none."""
        tokenizer = self._alive.renderer.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer.")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters for requests without any, from the model's
        generation_config.json."""
        return self._alive.requests.defaults.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Stop using all blocks cached so far, in memory, directories and stores; return True.
        Running requests keep their blocks. Pinned prefixes are computed again."""
        self._alive.client.reset_prefix_cache()
        return True

    def update_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        version: str = "",
        *,
        partial: bool = False,
    ) -> str:
        """Replace all weights, between two steps. Return their version, which outputs name.

        weights: folder of *.safetensors files, GGUF file, or all of torch's tensors by their names
        in the checkpoint, such as `model.state_dict()`. They are packed like the first ones.
        version: name for them; by default a number. partial: give some of the tensors, or a
        `SparseDelta` for some; the others stay. It needs the files of the present weights.

        No cached block of the old weights is used again. Open streams continue with their own
        blocks. Raises RequestError if the weights do not fit the model; the old ones then stay."""
        with weight_files(weights) as path:
            made, outputs = self._alive.client.update_weights(path, version, is_partial=partial)
        self._store(outputs)
        return made

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: on level 1 the KV blocks, on level 2 also the weights.

        mode: what happens to open streams: `abort` ends them with what they have, `wait` lets them
        finish. The prefix cache is empty afterwards. Requests are refused while the engine sleeps.
        Raises RequestError if the engine cannot sleep."""
        aborts = is_aborting(mode)
        _, outputs = self._alive.client.set_sleep(checked_level(level), aborts=aborts)
        self._store(outputs)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again. tags: parts to wake, `weights` and `kv_cache`; None wakes both.

        Requests run once both are awake. Then weights that `update_weights` has not replaced are
        loaded from their files. Raises RequestError, and sleeps on, if these have changed."""
        wakes = SLEEPING_PARTS if tags is None else tags
        _, outputs = self._alive.client.set_sleep(wakes=wakes)
        self._store(outputs)

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine, or a part of it, sleeps."""
        return self._alive.client.set_sleep()[0]

    def pin_prefix(
        self, prompt: Prompt | Messages, ttl_s: float = 0.0, cache_salt: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and pin its KV blocks for ttl_s seconds; 0 pins them until
        `unpin_prefix`. Prompts that begin with its tokens and have its salt compute only the rest.
        Messages are rendered without a generation prompt. Raises RequestError, and StepFailed if a
        step failed."""
        engine = self._alive
        prompt, media = self._media.take(prompt)
        options = ChatOptions(add_generation_prompt=False)
        rendered = engine.renderer.render(prompt, options, media=media)
        salt = cache_salt or salt_of(prompt)
        request = admit(engine.client, engine.requests.make_pin(rendered, ttl_s, None, salt))
        bar = RequestBar(1, enabled=False)
        done = self._finished([request], [rendered], bar)[request.request_id]
        [pinned] = done.outputs
        if pinned.finish_reason != "pinned":
            error = pinned.error
            kind = StepFailed if error and error.code == STEP_FAILED else RequestError
            why = pinned.finish_reason if error is None else error.message
            raise kind(f"the prefix was not pinned: {why}")
        for prefix in self.pinned_prefixes():
            if prefix.id == request.request_id:
                return prefix
        raise RequestError("the prefix was pinned, but its ttl_s has passed already; raise ttl_s.")

    def unpin_prefix(self, prefix_id: str) -> bool:
        """Remove a pin; return False if the id is unknown. Running requests keep their blocks."""
        return self._alive.client.unpin(prefix_id)

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return the pinned prefixes, oldest first."""
        return self._alive.client.prefixes()

    def session(self, keep_s: float = KEEP_S, cache_salt: str = "") -> Session:
        """Begin a session: tokens that can be extended, forked and rewound. KV blocks are
        retained for keep_s seconds after each answer. Hooks do not support sessions, which
        exchange tokens."""
        if self._hooks is not None:
            raise ConfigError("sessions do not support hooks; create an LLM without hooks.")

        def run(request: Request) -> RequestOutput:
            bar = RequestBar(1, enabled=False)
            prompt = RenderedPrompt(request.prompt_token_ids)
            return self._finished([request], [prompt], bar)[request.request_id]

        return Session(self._alive, run, keep_s, cache_salt)

    def close(self) -> None:
        """Free the model and its KV memory. Cached blocks are first written to a configured
        directory or store, for at most KEEP_AT_END_S. A second call does nothing."""
        if self._engine is not None:
            self._engine.client.close()
            self._engine = None
            if self._hooks is not None:
                self._hooks.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine's parts, for tools and tests. Raises ConfigError if cores are processes."""
        if not isinstance(self._alive, Engine):
            num = self._alive.config.parallel.data_parallel_size
            raise ConfigError(
                f"data_parallel_size={num}: the cores are not in this process, so there is no"
                " single core to return."
            )
        return self._alive

    @property
    def _alive(self) -> Engine | ProcessEngine:
        if self._engine is None:
            raise ConfigError("this LLM is closed; create a new one.")
        return self._engine

    def _admitted(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions | None = None,
    ) -> tuple[list[Any], list[LocalRequest]]:
        """Return prompts as changed by hooks, with their requests; unchanged without hooks."""
        if self._hooks is None:
            return prompts, []
        return self._hooks.admit(prompts, self._params(sampling_params, len(prompts)), options)

    def _run(
        self,
        prompts: list[RenderedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        salts: list[str],
        priority: Sequence[int] | None,
        show_progress: bool,
        hooked: list[LocalRequest],
        makers: list[RequestMaker],
        form: AnswerFormat | None = None,
    ) -> list[RequestOutput]:
        """Check all requests, add them, and step until all are done. makers: makers of the
        requests, by prompt. form: answer format of a conversation."""
        engine = self._alive
        priorities = _each(priority if priority is not None else 0, len(prompts), "priority")
        names: list[str | None] = [each.request_id for each in hooked] or [None] * len(prompts)
        params_of = self._params(sampling_params, len(prompts))
        longest = engine.client.max_model_len
        prompts = [truncated_for(*each, longest) for each in zip(params_of, prompts, strict=True)]
        if hooked:
            priorities = [each.priority(own) for each, own in zip(hooked, priorities, strict=True)]
        requests = []
        for prompt, params, name, salt, number, maker in zip(
            prompts, params_of, names, salts, priorities, makers, strict=True
        ):
            grammar = checked_grammar(engine.renderer, params, prompt, form)
            made = maker.make(prompt, params, name, salt, number, grammar=grammar)
            requests.append(admit(engine.client, made))
        bar = RequestBar(sum(r.params.n for r in requests), enabled=show_progress)
        done = self._finished(requests, prompts, bar)
        outputs = [done[request.request_id] for request in requests]
        if hooked:
            return [each.finish(output) for each, output in zip(hooked, outputs, strict=True)]
        return outputs

    def makers(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[RequestMaker]:
        """Return the maker of each prompt's request, by its adapter."""
        maker = self._alive.requests
        return [
            self._adapters.maker_of(maker, each) for each in _each(given, count, "lora_request")
        ]

    def _pooling(self, show_progress: bool) -> Pooling:
        def finish(requests: list[Request], prompts: list[RenderedPrompt]) -> list[RequestOutput]:
            bar = RequestBar(len(requests), enabled=show_progress)
            done = self._finished(requests, prompts, bar)
            return [done[request.request_id] for request in requests]

        return Pooling(self._alive, finish)

    def _seen(self, prompts: Prompt | Sequence[Prompt]) -> list[Any]:
        """Return prompts for pooling, as changed by hooks."""
        listed = _as_list(prompts)
        for prompt in listed:
            refuse_media(prompt, "a model that pools")
        return self._admitted(listed, SamplingParams())[0]

    def _finished(
        self, requests: list[Request], prompts: list[RenderedPrompt], bar: RequestBar
    ) -> dict[str, RequestOutput]:
        """Add checked requests, and step until they are done."""
        client, done = self._alive.client, dict[str, RequestOutput]()
        try:
            with bar:
                for request, prompt in zip(requests, prompts, strict=True):
                    client.add(request, prompt.text)
                while len(done) < len(requests):
                    _collect(self._step(), done, bar)
        except BaseException:
            client.abort([r.request_id for r in requests if r.request_id not in done])
            raise
        return done

    def _step(self) -> list[RequestOutput]:
        """Run one step, return its outputs, and store outputs of open streams for them."""
        return self._store(self._alive.client.step())

    def _store(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Store outputs of open streams for them; return the others."""
        others: list[RequestOutput] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            (others if stream is None else stream).append(output)
        return others

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Return one copy per request that requests only the final output."""
        listed = []
        requested = self.get_default_sampling_params() if given is None else given
        for params in _each(requested, count, "sampling_params"):
            own = params.clone()
            own.output_kind = RequestOutputKind.FINAL_ONLY
            listed.append(own)
        return listed


def _collect(outputs: list[RequestOutput], done: dict[str, RequestOutput], bar: RequestBar) -> None:
    for output in outputs:
        if output.finished:
            done[output.request_id] = output
            bar.finished(output)


def _as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts from one prompt or several; a list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _each(value: Any, count: int, name: str) -> list[Any]:
    """Return a list that repeats one value, or a sequence with one value per prompt."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts; give one for each."
        )
    return list(value)
