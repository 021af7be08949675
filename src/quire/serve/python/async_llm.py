"""`AsyncLLM`: an engine in a process of its own for asyncio programs, with vLLM's interface.

Tokenization and detokenization run in this process, on the event loop. The rest runs in the core's
process, or in the processes of several cores.
"""

import asyncio
import contextlib
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from quire.base.errors import ConfigError, EngineDead, RequestError
from quire.base.messages import PinnedPrefix, Request
from quire.base.requests.lora_request import LoRARequest
from quire.base.requests.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.base.requests.pooling_params import TASK_NAMES, PoolingParams, needed_task
from quire.base.requests.retention import check_open
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.client.adapters import AdapterMakers
from quire.engine.client.admission import admit, checked_grammar_async
from quire.engine.client.async_client import pause, pin, sleep, wake_up
from quire.engine.client.fleet import CoreClient, client_of
from quire.engine.start.preflight import check_before_loading
from quire.engine.start.text import TextSide, build_text_side
from quire.engine.wire.core_choice import check_core
from quire.models.checkpoint.source import resolve_source
from quire.models.load.weight_files import weight_files
from quire.render.media.parts import refuse_media
from quire.render.pooling_prompts import to_pool
from quire.render.renderer import Messages, Prompt, RenderedPrompt, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.truncation import truncated_for
from quire.serve.async_renderer import AsyncRenderer, TextThreads, size_of
from quire.serve.media.local_media import LocalMedia
from quire.serve.processes.managed_core import ManagedCores
from quire.serve.python.async_session import AsyncSession
from quire.serve.python.piece_reader import Piece, PieceReader
from quire.serve.python.pooling import numbers_of, parts_of, salt_of
from quire.serve.python.session_tokens import KEEP_S
from quire.serve.vllm_compat import drop_vllm_settings

CONNECT_S = 1.0  # interval of checks that the core still runs

# Makes a request from a prompt, its cache_salt, and whether it is a conversation
MakeRequest = Callable[[RenderedPrompt, str, bool], Awaitable[Request]]


class AsyncEngineArgs(SimpleNamespace):
    """Arguments of `AsyncLLM` as attributes, which is vLLM's way to pass settings."""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        super().__init__(model=model, **settings)


class AsyncLLM:
    """An engine in a process of its own, for any number of requests at once.

        async with await AsyncLLM.create("demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    model, settings: as for `LLM`. The constructor returns when the model is loaded; `create` does
    the same without blocking the event loop. An object serves one event loop at a time. It ends
    with `shutdown`, with its `async with` block, or with the program.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._prepare(model, settings)
        try:
            self._load()
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    async def create(cls, model: str = "demo", **settings: Any) -> "AsyncLLM":
        """Create an engine like the constructor does, without blocking the event loop."""
        engine = cls.__new__(cls)
        engine._prepare(model, settings)
        try:
            await asyncio.to_thread(engine._load)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: None = None,
    ) -> "AsyncLLM":
        """Create an engine from vLLM's arguments. The last three parameters exist for
        compatibility: stat_loggers are rejected, the others are ignored."""
        if stat_loggers is not None:
            raise ConfigError("stat_loggers are not supported; remove them.")
        return cls(**vars(engine_args))

    def _prepare(self, model: str, settings: dict[str, Any]) -> None:
        self._media_settings = (
            settings.pop("allowed_local_media_path", ""),
            settings.pop("allowed_media_domains", ()),
        )
        drop_vllm_settings(settings)
        settings.pop("limit_mm_per_prompt", None)  # the program controls this itself
        self._config: EngineConfig = config_from_flat(model=model, **settings)
        self._adapters = AdapterMakers(self._config.lora.usable_rank)
        self._cores = ManagedCores(self._config, "warning")
        # Also stops the cores when the program ends
        self._end = weakref.finalize(self, ManagedCores.stop, self._cores)
        self._loaded: TextSide | None = None
        self._text_threads = TextThreads(
            inf, inf
        )  # no limits, because all prompts are the program's own
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: CoreClient | None = None  # client on that event loop
        self._closing: asyncio.Task[None] | None = None

    def _load(self) -> None:
        """Load the model. The text side is built while the core loads."""
        source = resolve_source(self._config.model)
        check_before_loading(self._config, source)
        self._cores.start()
        self._loaded = build_text_side(self._config.model, source)
        self._media = LocalMedia(self._loaded.renderer, *self._media_settings)
        self._cores.wait_until_ready()

    # ---- requests ----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt | Messages | AsyncIterable[Piece],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        timeout_s: float = 0.0,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt, or answer one conversation.

        A prompt may arrive in pieces, from an asynchronous iterator of texts, lists of token ids,
        {"prompt": text} or {"prompt_token_ids": ids}. Each piece is computed while the next one is
        awaited, and generation begins when the iterator ends. The last word of a text is held until
        more text arrives, so the result equals the tokens of the whole text. The request starts
        with its first token; `timeout_s` and `abort` apply from then on. While it waits for a
        piece, it may be preempted. An exception of the iterator ends the request and is raised
        here.

        `sampling_params.output_kind` sets the contents of an output: everything so far
        (CUMULATIVE), only new tokens (DELTA), or everything at the end (FINAL_ONLY). A reader that
        is slower than the engine gets several steps in one output. The request ends if the
        iteration stops early or the reading task is cancelled.

        Args:
            prompt: as for `LLM.generate` and `LLM.chat`, or in pieces
            sampling_params: the model's defaults if absent
            request_id: unique among open requests; a running number if absent
            lora_request: adapter of the model, if the engine has enable_lora
            data_parallel_rank: core that must serve the request; the best suited one if absent
            timeout_s: seconds until the request ends with finish_reason `timeout`
            tenant: owner of the request; tenants share the engine evenly
            trace_headers: ignored

        Raises:
            RequestError: the request cannot be served
            EngineBusy: there are more than max_num_queued_reqs requests
            EngineDead: the core has ended or ends
        """
        check_core(data_parallel_rank, self._config.parallel.data_parallel_size)
        text = self._text
        params = sampling_params or self.get_default_sampling_params()
        maker = text.requests
        if lora_request is not None:
            maker = await asyncio.to_thread(self._adapters.maker_of, maker, lora_request)

        async def make(rendered: RenderedPrompt, salt: str, is_chat: bool) -> Request:
            form = text.renderer.answer_format() if is_chat else None
            grammar = await checked_grammar_async(text.renderer, params, rendered, form)
            made = maker.make(
                rendered, params, request_id, salt, priority, tenant, timeout_s, grammar
            )
            return admit(await self._connected(), made, core_id=data_parallel_rank)

        if isinstance(prompt, AsyncIterable):
            check_open(params)
            outputs = self._from_pieces(prompt, make)
        else:
            outputs = self._from_whole(prompt, params, make)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def _from_whole(
        self, prompt: Prompt | Messages, params: SamplingParams, make: MakeRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        rendered = await self._render(prompt)
        if params.truncate_prompt_tokens is not None:
            length = (await self._connected()).ready.max_model_len
            rendered = truncated_for(params, rendered, length)
        request = await make(rendered, salt_of(prompt), is_conversation(prompt))
        async with contextlib.aclosing(self._outputs_of(request, rendered.text)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs_of(
        self, request: Request, text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        client = await self._connected()
        try:
            async with contextlib.aclosing(_sent(client, request, text)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDead as error:
            raise self._cores.dead() from error

    async def _from_pieces(
        self, pieces: AsyncIterable[Piece], make: MakeRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        client = await self._connected()
        async with PieceReader(pieces, self._text.renderer, self._text_threads) as reader:
            rendered = await reader.first()
            made = await make(rendered, reader.cache_salt or "", False)
            request = admit(client, made, is_open=not reader.is_complete)
            reader.follow(client, request.request_id)
            try:
                async with contextlib.aclosing(_sent(client, request, None)) as outputs:
                    async for output in outputs:
                        output.prompt = reader.text
                        yield output
            except EngineDead as error:
                if error is reader.error:  # raised by another engine that the iterator uses
                    raise
                raise self._cores.dead() from error

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float = 0.0,
        tenant: str = "",
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the pooled output of a prompt once, as `LLM.encode` does. The other parameters and
        the errors are the same as for `generate`."""
        refuse_media(prompt, "a model that pools")
        client = await self._connected()
        params = pooling_params or PoolingParams()
        spec, longest = needed_task(client.ready.pooling, *TASK_NAMES), client.ready.max_model_len
        rendered = await self._text_threads.run(
            size_of(prompt), to_pool, self._text.renderer, [prompt], params, longest
        )
        request = self._text.requests.make_pooling(
            rendered, request_id, salt_of(prompt), priority, tenant, timeout_s
        )
        request = admit(client, request)
        try:
            async with contextlib.aclosing(_sent(client, request, rendered.text)) as outputs:
                async for output in outputs:
                    made = PoolingOutput(numbers_of(output, spec, params))
                    yield PoolingRequestOutput(*parts_of(output, made))
        except EngineDead as error:
            raise self._cores.dead() from error

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests. Their readers get the output so far, with finish_reason
        `abort`. Unknown ids are ignored."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        if self._link is not None and self._loop is asyncio.get_running_loop():
            for name in names:
                self._link.abort(name)

    async def _render(
        self, prompt: Prompt | Messages, options: ChatOptions | None = None
    ) -> RenderedPrompt:
        """Return token ids and text. Long prompts are tokenized outside of the event loop."""
        renderer = AsyncRenderer(self._text.renderer, self._text_threads)
        prompt, media = await self._media.take_async(prompt)
        return await renderer.render(prompt, options, media=media)

    # ---- the engine --------------------------------------------------------------------------

    async def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise RequestError if the model has none."""
        tokenizer = self._text.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer.")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters for requests without any, from the model's
        generation_config.json."""
        return self._text.requests.defaults.default_sampling_params()

    async def pin_prefix(
        self,
        prompt: Prompt | Messages,
        ttl_s: float = 0.0,
        cache_salt: str = "",
        tenant: str = "",
        share: float = 1.0,
    ) -> PinnedPrefix:
        """Compute and pin a prefix, as `LLM.pin_prefix` does. Cancelling the task stops the
        computation. share: the tenant's share of the memory for pinned prefixes."""
        rendered = await self._render(prompt, ChatOptions(add_generation_prompt=False))
        salt = cache_salt or salt_of(prompt)
        made = self._text.requests.make_pin(rendered, ttl_s, None, salt, tenant, share)
        client = await self._connected()
        request = admit(client, made)
        try:
            return await pin(client, request)
        except asyncio.CancelledError:  # the prefix may already be pinned
            with contextlib.suppress(EngineDead):
                await client.unpin(request.request_id)
            raise
        except EngineDead as error:
            raise self._cores.dead() from error

    async def unpin_prefix(self, prefix_id: str) -> bool:
        """Remove a pin; return False if the id is unknown."""
        return await (await self._connected()).unpin(prefix_id)

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return the pinned prefixes, oldest first."""
        return await (await self._connected()).prefixes()

    def session(self, keep_s: float = KEEP_S, cache_salt: str = "") -> AsyncSession:
        """Begin a session, as `LLM.session` does."""
        text, num_cores = self._text, self._config.parallel.data_parallel_size
        renderer = AsyncRenderer(text.renderer, self._text_threads)
        return AsyncSession(
            text, renderer, self._outputs_of, self._connected, num_cores, keep_s, cache_salt
        )

    async def reset_prefix_cache(self) -> bool:
        """Stop using all blocks cached so far, in memory, directories and stores. Running requests
        keep their blocks. Pinned prefixes are computed again."""
        await (await self._connected()).reset_prefix_cache()
        return True

    async def update_weights(
        self, weights: str | Path | Mapping[str, Any], version: str = "", *, partial: bool = False
    ) -> str:
        """Replace all weights, or some, as `LLM.update_weights` does. Running requests continue."""
        client = await self._connected()
        with contextlib.ExitStack() as stack:
            path = await asyncio.to_thread(stack.enter_context, weight_files(weights))
            return await client.update_weights(str(path), version, is_partial=partial)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pause all requests between two steps. mode: `abort` ends running requests with what they
        have; `wait` lets them finish first; `keep` freezes them until `resume_generation`. Requests
        that arrive meanwhile wait. clear_cache: whether to reset the prefix cache. Raises
        RequestError for another mode."""
        await pause(await self._connected(), mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Continue after `pause_generation`."""
        await (await self._connected()).pause(False)

    async def is_paused(self) -> bool:
        """Return whether `pause_generation` is in effect."""
        return await (await self._connected()).pause(None)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`, as `LLM.sleep` does. Requests that arrive meanwhile
        wait."""
        await sleep(await self._connected(), level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, as `LLM.wake_up` does."""
        await wake_up(await self._connected(), tags)

    async def is_sleeping(self) -> bool:
        """Return whether the engine, or a part of it, sleeps."""
        return await (await self._connected()).set_sleep()

    async def check_health(self) -> None:
        """Raise EngineDead if the core has ended, or makes no progress."""
        self._cores.check()

    @property
    def is_running(self) -> bool:
        return self._cores.is_alive and not self._cores.is_stopped

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the core has ended unexpectedly."""
        return self.is_stopped and not self._cores.is_stopped

    @property
    def dead_error(self) -> EngineDead:
        """The error that requests get after the core has ended."""
        return self._cores.dead()

    def shutdown(self) -> None:
        """End the core and free its memory; open requests end with EngineDead. Waits for the end of
        the process, including its present step and the writing of cached blocks to a directory or
        store. A second call does nothing."""
        loop = self._loop
        self._end()
        if loop is None or loop.is_closed():
            return
        if _is_running_here(loop):
            self._disconnect()
        elif loop.is_running():
            loop.call_soon_threadsafe(self._disconnect)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._end)
        self.shutdown()
        if self._closing is not None:
            await self._closing

    # ---- the connection ----------------------------------------------------------------------

    @property
    def _text(self) -> TextSide:
        if self._loaded is None or not self.is_running:
            raise self._cores.dead()
        return self._loaded

    async def _connected(self) -> CoreClient:
        """Return the client of the running event loop, connected to the core."""
        client = self._client()
        while not client.is_alive:
            self._cores.check_some()
            try:
                await asyncio.wait_for(client.wait_until_ready(), CONNECT_S)
            except TimeoutError:
                continue
            except EngineDead as error:
                raise self._cores.dead() from error
        return client

    def _client(self) -> CoreClient:
        loop = asyncio.get_running_loop()
        if self._link is not None and self._loop is loop:
            return self._link
        if self._loop is not None and self._loop.is_running():
            raise ConfigError(
                "this AsyncLLM belongs to another event loop, which is still running; use it from"
                " that loop, or create another AsyncLLM."
            )
        self._link = client_of(self._cores.paths, self._text.tokenizer)
        self._loop = loop
        self._link.start()
        return self._link

    def _disconnect(self) -> None:
        """Fail all requests and close the connection; runs on the event loop."""
        link, self._link = self._link, None
        if link is not None:
            link.fail_all(self._cores.dead())
            self._closing = asyncio.ensure_future(link.close())


class AsyncLLMEngine(AsyncLLM):
    """vLLM's older name of `AsyncLLM`."""


def _sent(
    client: CoreClient, request: Request, text: str | None
) -> AsyncGenerator[RequestOutput, None]:
    """Return the outputs of a request. The request is sent when the first output is awaited."""
    return cast(AsyncGenerator[RequestOutput, None], client.generate(request, text))


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
