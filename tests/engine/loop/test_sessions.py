"""Retained requests in a whole engine: forks get exactly the demo model's tokens, whatever they
share and however short memory is. The in-process client reports them correctly.

Covers `engine/client/client.py`.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import EngineBusy, RequestError
from quire.base.messages import Fork, Request, RetainedRequest
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind
from quire.base.settings.cache_config import CacheConfig
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics
from quire.ops.host.native import core
from quire.render.renderer import RenderedPrompt
from quire.scheduler.reuse import held
from tests.support.cases import in_turn, slow_but
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
STORY = "Once upon a time there was a little fox. One day the fox went into the forest. "
OTHERS = ["The bear sat by the river and", "Long ago, in a small house,", "A bird sang. Then"]


class Engine:
    """An engine of the demo model that takes prompts as token ids."""

    def __init__(self, num_blocks: int = 26, **settings: Any) -> None:
        sizes = {"max_num_seqs": 6, "max_model_len": 128, "dtype": "float32"}
        sizes["kv_cache_dtype"] = settings.get("kv_cache_dtype", "auto")
        with LLM("demo", disable_log_stats=True, kv_cache_memory_bytes=1 << 20, **sizes) as one:
            size = (1 << 20) // one.engine.memory.num_blocks[0]
        settings = {"kv_cache_memory_bytes": num_blocks * size} | sizes | settings
        self.llm = LLM("demo", disable_log_stats=True, **settings)
        self.client = self.llm.engine.client
        self.scheduler = self.client.core.scheduler
        self.story = self.llm.get_tokenizer().encode(STORY, False)
        self.num_asked = 0
        self._found: dict[str, list[Any]] = {}

    def ask(self, token_ids: list[int], fork: Fork | None = None, **params: Any) -> Request:
        keep_s = params.pop("keep_s", 0.0)
        made = SamplingParams(**({"temperature": 1.0, "seed": 3, "ignore_eos": True} | params))
        made.output_kind = RequestOutputKind.FINAL_ONLY
        self.num_asked += 1
        prompt, name = RenderedPrompt(token_ids), f"r{self.num_asked}"
        request = self.llm.engine.requests.make(prompt, made, name)
        request = msgspec.structs.replace(request, keep_s=keep_s, fork=fork)
        self.client.add(request)
        return request

    def finish(self, *requests: Request) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        while len(done) < len(requests):
            done |= {o.request_id: o for o in self.client.step() if o.finished}
            self.scheduler.check_invariants()
        return [done[request.request_id] for request in requests]

    def tokens(self, token_ids: list[int], fork: Fork | None = None, **params: Any) -> list[Any]:
        """Return the tokens of all samples of a new request."""
        [output] = self.finish(self.ask(token_ids, fork, **params))
        return [completion.token_ids for completion in output.outputs]

    def plain(self, token_ids: list[int], **params: Any) -> list[Any]:
        """Return the tokens of a request without a fork; results are cached."""
        key = repr((token_ids, sorted(params.items())))
        if key not in self._found:
            self._found[key] = self.tokens(token_ids, **params)
        return self._found[key]

    def kept(self, **params: Any) -> RetainedRequest:
        """Serve a request and return it as retained."""
        request = self.ask(self.story, **({"max_tokens": 20, "keep_s": 600} | params))
        self.finish(request)
        return self.held(request.request_id)

    def held(self, name: str, index: int = 0) -> RetainedRequest:
        [found] = self.client.held(name, index)
        return found

    def close(self) -> None:
        self.llm.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    """An engine with spare memory and no retained requests."""
    engine = Engine(num_blocks=200, enable_prefix_caching=False, max_num_seqs=8)
    yield engine
    engine.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "depth 2": {"pipeline_depth": 2},
    "int8 blocks": {"kv_cache_dtype": "int8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "host tier": {"kv_host_gb": 0.01},
    "swapping": {"preemption_mode": "swap", "max_num_batched_tokens": 16},
}


@pytest.fixture(autouse=True)
def engines_release_everything(request: pytest.FixtureRequest) -> Iterator[None]:
    names = [name for name in ("engine", "reference") if name in request.fixturenames]
    engines = [request.getfixturevalue(name) for name in names]
    yield
    for engine in engines:
        _release_all(engine)


def _release_all(engine: Engine) -> None:
    for one in engine.client.held():
        engine.client.keep(one.id, 0.0)
    engine.scheduler.check_invariants()
    view = engine.client.core.view()
    assert view.num_free_blocks == view.num_blocks, "blocks leak"


@pytest.fixture(scope="module", params=slow_but(SETTINGS, "drafts", "host tier", "swapping"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(**SETTINGS[request.param])
    yield made
    made.close()


def reference_for(engine: Engine, reference: Engine) -> Engine:
    """Return the engine that computes the expected tokens; int8 blocks change the numbers."""
    is_exact = engine.llm.engine.config.cache.kv_cache_dtype != "int8"
    return reference if is_exact else engine


@pytest.mark.parametrize("at", slow_but((None, -1, 33, 32, 5), None, 33, 32))
def test_fork_gives_the_tokens_of_a_new_request(
    engine: Engine, reference: Engine, at: int | None
) -> None:
    source = engine.kept()
    tokens = source.token_ids[:at]
    added = [40, 41] if at == 33 else []
    oracle = reference_for(engine, reference)
    expected = oracle.plain(tokens + added, n=2, max_tokens=9, seed=11)
    fork = Fork(source.id, 0, len(tokens))
    [output] = engine.finish(engine.ask(tokens + added, fork, n=2, max_tokens=9, seed=11))
    assert [c.token_ids for c in output.outputs] == expected
    assert output.num_cached_tokens == len(tokens) - (not added)


def test_each_branch_costs_at_most_one_block(engine: Engine) -> None:
    """Branches share full blocks. Each copies the last block, except for the one that owns it in
    the end."""
    source = engine.kept(max_tokens=24)
    view = engine.client.core.view
    before = view().num_free_blocks
    tokens = source.token_ids
    assert (len(tokens) - 1) % 16, "the last block is not full"
    engine.ask(tokens, Fork(source.id, 0, len(tokens)), n=3, max_tokens=4)
    while not any(s.num_output_tokens == 2 for s in engine.scheduler.rows.sequences()):
        engine.client.step()
    assert before - view().num_free_blocks <= 3
    while engine.client.num_unfinished:
        engine.client.step()
    assert view().num_free_blocks == before


def test_running_request_can_be_forked(engine: Engine, reference: Engine) -> None:
    source = engine.ask(engine.story, max_tokens=40, seed=5)
    while not (found := engine.held(source.request_id)).num_tokens > len(engine.story) + 9:
        engine.client.step()
    tokens = found.token_ids
    assert found.expires_in_s is None
    oracle = reference_for(engine, reference)
    forks = [
        engine.ask(tokens[:at], Fork(source.request_id, 0, at), max_tokens=12, seed=at)
        for at in (len(tokens), len(tokens) - 3)
    ]
    outputs = engine.finish(source, *forks)
    for request, output in zip([source, *forks], outputs, strict=True):
        params = {"max_tokens": request.params.max_tokens, "seed": request.params.seed}
        assert output.outputs[0].token_ids == oracle.plain(request.prompt_token_ids, **params)[0]
    assert outputs[2].num_cached_tokens == len(tokens) - 4


def test_new_requests_evict_blocks_of_retained_ones(engine: Engine, reference: Engine) -> None:
    """Requests that need the whole pool do not wait. Later forks recompute the evicted blocks."""
    sources = [engine.kept(seed=i) for i in range(4)]
    oracle = reference_for(engine, reference)
    ids = [engine.llm.get_tokenizer().encode(text, False) for text in OTHERS]
    many = [engine.ask(tokens, max_tokens=64, seed=i, n=2) for i, tokens in enumerate(ids)]
    outputs = engine.finish(*many)
    for i, (tokens, output) in enumerate(zip(ids, outputs, strict=True)):
        got = [completion.token_ids for completion in output.outputs]
        assert got == oracle.plain(tokens, max_tokens=64, seed=i, n=2)
    standing = engine.scheduler.retained.standing
    assert len(standing) < 4, "no retained request lost its blocks"
    for source in sources:
        tokens = engine.held(source.id).token_ids
        assert tokens == source.token_ids
        fork = Fork(source.id, 0, len(tokens))
        assert engine.tokens(tokens, fork, max_tokens=8) == oracle.plain(tokens, max_tokens=8)
        engine.client.keep(source.id, 0.0)


def test_rewound_request_can_be_continued(engine: Engine, reference: Engine) -> None:
    source = engine.kept()
    left = source.num_tokens - 7
    engine.client.rewind(source.id, 0, left)
    tokens = engine.held(source.id).token_ids
    assert tokens == source.token_ids[:left]
    whole = [*tokens, 50, 51, 52]
    fork = Fork(source.id, 0, left, takes_over=True)
    request = engine.ask(whole, fork, max_tokens=9, keep_s=60)
    [output] = engine.finish(request)
    oracle = reference_for(engine, reference)
    assert [output.outputs[0].token_ids] == oracle.plain(whole, max_tokens=9)
    assert output.num_cached_tokens == left
    assert not engine.client.held(source.id), "the source is still retained after a takeover"
    assert engine.held(request.request_id).token_ids == whole + output.outputs[0].token_ids


def test_stop_string_cuts_the_retained_tokens(engine: Engine) -> None:
    request = engine.ask(engine.story, max_tokens=60, stop=["e"], keep_s=60, temperature=0.0)
    [output] = engine.finish(request)
    while engine.client.core.has_work:
        engine.client.step()
    [completion] = output.outputs
    assert completion.finish_reason == "stop"
    assert engine.held(request.request_id).token_ids == engine.story + completion.token_ids


def test_aborted_request_is_not_retained(engine: Engine) -> None:
    request = engine.ask(engine.story, max_tokens=60, keep_s=60)
    engine.client.step()
    engine.client.abort([request.request_id])
    assert not engine.client.held(request.request_id)
    while engine.client.core.has_work:
        engine.client.step()


def test_cache_reset_keeps_the_retained_tokens(engine: Engine) -> None:
    source = engine.kept()
    engine.client.reset_prefix_cache()
    assert engine.held(source.id).num_blocks == 0
    tokens = source.token_ids
    request = engine.ask(tokens, Fork(source.id, 0, len(tokens)), max_tokens=3)
    [output] = engine.finish(request)
    assert output.num_cached_tokens == 0


def test_fork_with_different_tokens_is_rejected(reference: Engine) -> None:
    source = reference.kept()
    tokens = source.token_ids
    with pytest.raises(RequestError, match="does not begin"):
        reference.ask([1, *tokens[1:]], Fork(source.id, 0, len(tokens)))
    with pytest.raises(RequestError, match="does not begin"):
        reference.ask([*tokens, 5], Fork(source.id, 0, len(tokens) + 1))
    reference.client.keep(source.id, 0.0)
    fork = Fork(source.id, 0, len(tokens))
    assert reference.tokens(tokens, fork, max_tokens=4) == reference.tokens(tokens, max_tokens=4)


def test_requests_beyond_the_retention_limits_are_rejected(
    reference: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MAX_RETAINED", 3)
    source = reference.kept()
    running = reference.ask(reference.story, max_tokens=2, keep_s=5)
    with pytest.raises(EngineBusy, match="sequences are retained or will be"):
        reference.ask(reference.story, max_tokens=2, n=2, keep_s=5)
    monkeypatch.setattr(held, "MAX_RETAINED_TOKENS", 150)
    with pytest.raises(EngineBusy, match="tokens are retained or will be"):
        reference.ask(reference.story, max_tokens=90, keep_s=5)
    reference.finish(running)
    for name in (source.id, running.request_id):
        reference.client.keep(name, 0.0)
    assert reference.client.held() == []


@needs_core
@pytest.mark.parametrize(
    ("architecture", "depth"), in_turn(("qwen3_5_text", "gemma3_text"), (1, 2))
)
def test_forks_work_for_layers_with_states_and_windows(architecture: str, depth: int) -> None:
    """Such layers can resume at few tokens only. A fork starts at the last one available and
    computes the rest; a fork at the end reuses everything."""
    settings = {"max_model_len": 96, "block_size": 4, "disable_log_stats": True}
    with LLM(str(checkpoint(architecture)), pipeline_depth=depth, **settings) as llm:  # type: ignore[arg-type]
        sampled = SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
        with llm.session() as story:
            story.append(random_tokens(40)[0]).generate(sampled)
            tokens = list(story.token_ids)
            forks = [story.fork(at) for at in (49, 48, 41, 40, 13)]
            outputs = [fork.generate(sampled) for fork in forks]
            if depth == 1:
                assert outputs[0].num_cached_tokens == 48
            for fork in forks:
                fork.close()
        llm.reset_prefix_cache()
        for at, output in zip((49, 48, 41, 40, 13), outputs, strict=True):
            prompt = {"prompt_token_ids": tokens[:at], "cache_salt": str(at)}
            [alone] = llm.generate([prompt], sampled, use_tqdm=False)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids, at
        assert llm.engine.client.core.view().usage == 0.0


def test_metrics_count_retained_requests(reference: Engine) -> None:
    def exported() -> list[str]:
        metrics, view = EngineMetrics(8, 128, True), reference.client.core.view
        text = Exposition(metrics, view, "demo", CacheConfig()).text()
        return re.findall(r"^quire:held_\w+{.*} (.*)$", text, re.MULTILINE)

    held = reference.kept(n=2)
    assert [float(number) for number in exported()] == [2, 2 * held.num_tokens]
    reference.client.keep(held.id, 0.0)
    assert [float(number) for number in exported()] == [0, 0]


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"adapter_id": "x"}])
@pytest.mark.parametrize("runs", [False, True])
def test_fork_with_another_salt_or_adapter_is_rejected(
    reference: Engine, other: dict[str, Any], runs: bool
) -> None:
    """Keys and values of the same tokens differ with the salt or the adapter."""
    source = reference.ask(reference.story, keep_s=60.0, max_tokens=3)
    if not runs:
        reference.finish(source)
    fork, tokens = Fork(source.request_id, 0, 5), reference.story[:9]
    forked = msgspec.structs.replace(source, request_id="other", fork=fork, prompt_token_ids=tokens)
    with pytest.raises(RequestError, match=f"{[*other][0]} must be the same as that of the source"):
        reference.client.add(msgspec.structs.replace(forked, **other))
    if runs:
        reference.finish(source)


def test_token_ids_after_the_shared_prefix_are_checked(reference: Engine) -> None:
    """The shared tokens are known to be in the vocabulary; the tokens after them are not."""
    held = reference.kept()
    fork = Fork(held.id, 0, 5)
    for wrong in (-1, 1 << 20, 1 << 40):
        with pytest.raises(RequestError, match="not in the vocabulary"):
            reference.ask([*held.token_ids[:5], wrong], fork)
        with pytest.raises(RequestError, match="does not begin with"):
            reference.ask([*held.token_ids[:4], wrong, 7], fork)
