"""Every pair of a request's features: in two requests in one batch, and together in one request.

In two requests, neither may change the other's answer. Together, the answer is the same in two
engines. One has room and takes one step at a time. The other is always short of memory, cuts
prompts into chunks and is a step ahead.

The same holds for prompts with images, on a tiny checkpoint. `make test` has every pair in two
requests, and a sixth of the pairs in one.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.base.errors import STEP_FAILED, RequestError
from quire.base.events import Stepped
from quire.base.messages import Fork, Request
from quire.base.requests.outputs import RequestOutput
from quire.engine.drafting.draft_pace import StepTimes
from quire.render.answers.grammar import params_grammar
from quire.render.renderer import RenderedPrompt
from tests.support.cases import slow_but
from tests.support.engine.image_engine import Images, finished
from tests.support.models.draft_heads import write_demo_head
from tests.support.models.reference_checkpoints import shallow, text_checkpoint

Pair = tuple[str, str]
PROMPT = "Once upon a time there was a little fox. One day the fox"
NUM_PROMPT_TOKENS = 14
MAX_TOKENS = 14


def nudge(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A function on the logits that depends on the tokens so far."""
    logits[len(token_ids) % 50 + 10] += 4
    return logits


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filters": {"top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {40: 3.0, 41: -100.0}},
    "bad_words": {"bad_words": ["fox"]},
    "min_tokens": {"min_tokens": 6},
    "stop": {"stop": [" and", "e"]},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 3},
    "best_of": {"n": 2, "best_of": 3},
    "beams": {"use_beam_search": True, "n": 2, "beam_width": 3, "temperature": 0.0},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{3,30}[.!]")},
    "json": {"structured_outputs": StructuredOutputsParams(json={
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"], "additionalProperties": False})},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "logits_processor": {"logits_processors": [nudge]},
}  # fmt: skip
PAIRS = list(combinations(FEATURES, 2))
# Features, and pairs, of one run.
THREES = [tuple(FEATURES)[i::6] for i in range(6)]
THREE_PAIRS = [tuple(PAIRS[i::51]) for i in range(51)]


def groups_of_four() -> list[tuple[str, ...]]:
    """Groups of features such that each pair is in one of them."""
    missing = {frozenset(pair) for pair in PAIRS}
    groups = []
    while missing:
        first = min(missing, key=sorted)
        group = [name for name in FEATURES if name in first]
        while len(group) < 4:
            num_new = {
                name: sum(frozenset((name, other)) in missing for other in group)
                for name in FEATURES
                if name not in group
            }
            group.append(max(num_new, key=num_new.__getitem__))
        missing -= {frozenset(pair) for pair in combinations(group, 2)}
        groups.append(tuple(group))
    return groups


def params_of(*names: str) -> SamplingParams:
    """Raises RequestError for what excludes each other."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": MAX_TOKENS}
    for name in names:
        fields |= FEATURES[name]
    return SamplingParams(**fields)


@dataclass(frozen=True)
class Bench:
    """An engine, and the prompt of all requests."""

    llm: LLM
    prompt: RenderedPrompt

    def request(self, params: SamplingParams) -> Request:
        """Raises RequestError for what excludes each other, or images."""
        grammar = params_grammar(self.llm.engine.renderer, params, self.prompt)
        return self.llm.engine.requests.make(self.prompt, params, grammar=grammar)

    def outputs(self, *params: SamplingParams) -> list[RequestOutput]:
        return finished(self.llm, [self.request(each) for each in params])

    def answers(self, *params: SamplingParams) -> list[Any]:
        return [shown(output) for output in self.outputs(*params)]


class Subject:
    """A model and a prompt: text, or images. drafted: a request for which some drafts are right."""

    def __init__(
        self, model: str, images: Images | None = None, drafted: SamplingParams | None = None
    ) -> None:
        self.model, self.images = model, images
        self.drafted = drafted or params_of("greedy", "ignore_eos")

    @contextmanager
    def open(self, **settings: Any) -> Iterator[Bench]:
        model = self.model
        own = {"max_model_len": 64, "dtype": "float32", "disable_log_stats": True}
        if model != "demo" and self.images is None:
            own["block_size"] = 4  # smaller than a chunk
        with LLM(model, **own, **settings) as llm:
            if self.images is None:
                tokenizer = llm.get_tokenizer()
                tokens = tokenizer.encode(PROMPT)[:NUM_PROMPT_TOKENS]
                prompt = RenderedPrompt(tokens, tokenizer.decode(tokens))
            else:
                prompt = self.images.rendered(self.images.prompts[1])
            yield Bench(llm, prompt)

    def block_bytes(self) -> int:
        """Return the bytes of a block; of 16 tokens where blocks have 4."""
        with self.open(kv_cache_memory_bytes=8 << 20) as made:
            engine = made.llm.engine
            if engine.config.cache.block_size == 4:
                return sum(group.block_bytes(16, 4) for group in engine.spec.cache_groups)
            return (8 << 20) // engine.memory.num_blocks[0]


# Random models with latent vectors, and with chunks. Their texts do not repeat themselves.
OTHER_GROUPS = {"latent": "deepseek_v3", "chunked": "llama4_text"}
FEW_TOKENS = dict.fromkeys(range(40, 43), 100.0)


@pytest.fixture(
    scope="module",
    params=[
        "text",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("images", *OTHER_GROUPS)),
    ],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "text":
        return Subject("demo")
    if request.param in OTHER_GROUPS:
        drafted = msgspec.structs.replace(params_of("ignore_eos"), logit_bias=FEW_TOKENS)
        return Subject(str(text_checkpoint(OTHER_GROUPS[request.param])), drafted=drafted)
    images = Images.write(tmp_path_factory.mktemp("images"), "qwen3_vl")
    return Subject(str(images.folder), images)


@pytest.fixture(scope="module")
def roomy(subject: Subject) -> Iterator[Bench]:
    plain = {"method": "none"}  # nor are tokens tried that a grammar forces
    settings = {"max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20, "speculative_config": plain}
    with subject.open(**settings) as made:
        yield made


@pytest.fixture(scope="module")
def short(subject: Subject) -> Iterator[Bench]:
    """A pool that a request for three and its neighbours do not fit into."""
    with subject.open(
        max_num_seqs=8, kv_cache_memory_bytes=6 * subject.block_bytes(), max_num_batched_tokens=8,
        pipeline_depth=2,
    ) as made:  # fmt: skip
        yield made


GUESSES: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_max": 1},
    "ngram, by the device": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 1,
    },
    "suffix": {"num_speculative_tokens": 5},
    "eagle3": {"num_speculative_tokens": 3},
    "draft_model": {"num_speculative_tokens": 3},
}
NEED_THE_DEMO = "eagle3", "draft_model"
GUESSES_AND_THREES = [  # in `make test` each method with one or two of the lists of features
    pytest.param(
        method,
        names,
        marks=[] if (i + j) % 5 == 0 else pytest.mark.slow,
        id=f"{method}-{', '.join(names)}",
    )
    for i, method in enumerate(GUESSES)
    for j, names in enumerate(THREES)
]


@pytest.fixture(scope="module", params=GUESSES)
def guessing(
    request: pytest.FixtureRequest, subject: Subject, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Short of memory, and it tries what followed the last tokens before: often it is wrong. How
    long steps take is not looked at, so that it guesses on any machine."""
    if subject.model != "demo" and request.param in NEED_THE_DEMO:
        pytest.skip("its draft model is for the demo model")
    settings = {"method": request.param, **GUESSES[request.param]}
    depth = 2 if request.param == "ngram, by the device" else 1
    if request.param == "eagle3":
        settings["model"] = str(tmp_path_factory.mktemp("head"))
        write_demo_head(Path(settings["model"]))
    num_blocks = 8
    if request.param == "draft_model":  # whose four layers have blocks besides
        settings["model"], num_blocks = str(shallow("demo", 4)), 14
    with pytest.MonkeyPatch.context() as patch, subject.open(
        max_num_seqs=8, kv_cache_memory_bytes=num_blocks * subject.block_bytes(),
        max_num_batched_tokens=16, speculative_config=settings, pipeline_depth=depth,
    ) as made:  # fmt: skip
        patch.setattr(StepTimes, "observe", lambda *_: None)
        yield made


def shown(output: RequestOutput) -> Any:
    """All that a client gets, with log-probabilities to the bit. A grammar and others' wishes may
    leave no token; no step fails."""
    assert STEP_FAILED not in {c.error.code for c in output.outputs if c.error is not None}
    choices = [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.cumulative_logprob, c.logprobs)
        for c in output.outputs
    ]
    return choices, output.prompt_logprobs


@pytest.fixture(scope="module")
def alone(roomy: Bench) -> dict[str, Any]:
    """Without what images exclude."""
    found = {}
    for name in FEATURES:
        with suppress(RequestError):
            found[name] = roomy.answers(params_of(name))[0]
    return found


class Expected:
    """What requests for two features get in an engine with room; each is asked once."""

    def __init__(self, roomy: Bench) -> None:
        self._roomy = roomy
        self._found: dict[Pair, Any] = {}

    def of(self, *pairs: Pair) -> dict[Pair, Any]:
        """Return the answers of those pairs that do not exclude each other."""
        asked: dict[Pair, SamplingParams] = {}
        for pair in pairs:
            with suppress(RequestError):
                params = params_of(*pair)
                self._roomy.request(params)
                asked[pair] = params
        new = {pair: params for pair, params in asked.items() if pair not in self._found}
        self._found |= zip(new, self._roomy.answers(*new.values()), strict=True)
        return {pair: self._found[pair] for pair in asked}


@pytest.fixture(scope="module")
def expected(roomy: Bench) -> Expected:
    return Expected(roomy)


@pytest.mark.parametrize(
    "names",
    [*groups_of_four(), *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS)],
    ids=", ".join,
)
def test_side_by_side(roomy: Bench, alone: dict[str, Any], names: tuple[str, ...]) -> None:
    names = tuple(name for name in names if name in alone)
    found = roomy.answers(*map(params_of, names))
    assert dict(zip(names, found, strict=True)) == {name: alone[name] for name in names}


@pytest.mark.parametrize(("guessing", "names"), GUESSES_AND_THREES, indirect=["guessing"])
def test_guesses_change_nothing(
    subject: Subject, guessing: Bench, alone: dict[str, Any], names: tuple[str, ...]
) -> None:
    names = tuple(name for name in names if name in alone)
    found = guessing.answers(*map(params_of, names), subject.drafted)
    assert dict(zip(names, found[:-1], strict=True)) == {name: alone[name] for name in names}


@pytest.mark.parametrize("form", ["json", pytest.param("regex", marks=pytest.mark.slow)])
@pytest.mark.parametrize("guessing", slow_but(GUESSES, "ngram", "draft_model"), indirect=True)
@pytest.mark.parametrize("names", slow_but(THREES, *THREES[::4]), ids=", ".join)
def test_guesses_at_an_answer_with_a_form_change_nothing(
    subject: Subject, expected: Expected, guessing: Bench, names: tuple[str, ...], form: str
) -> None:
    """Those that its grammar forces, and others."""
    wanted = expected.of(*((form, name) for name in names))
    params = [params_of(*pair) for pair in wanted]
    found = guessing.answers(*params, subject.drafted)
    assert dict(zip(wanted, found[:-1], strict=True)) == wanted


@pytest.mark.parametrize("one", slow_but(FEATURES, *tuple(FEATURES)[::3]))
def test_a_fork_changes_nothing(
    roomy: Bench, short: Bench, alone: dict[str, Any], one: str
) -> None:
    """Of what is held, at the end of the prompt, with room and without."""
    if one not in alone:
        pytest.skip("images exclude it")
    for bench in (roomy, short):
        made = bench.request(params_of("ignore_eos"))
        finished(bench.llm, [msgspec.structs.replace(made, keep_s=60.0)])
        fork = Fork(made.request_id, 0, len(made.prompt_token_ids))
        asked = msgspec.structs.replace(bench.request(params_of(one)), fork=fork)
        [output] = finished(bench.llm, [asked])
        assert shown(output) == alone[one]
        bench.llm.engine.client.keep(made.request_id, 0.0)


@pytest.mark.parametrize("names", slow_but(THREES, *THREES[1::2]), ids=", ".join)
def test_pauses_and_priorities_change_nothing(
    roomy: Bench, short: Bench, alone: dict[str, Any], names: tuple[str, ...]
) -> None:
    names = tuple(name for name in names if name in alone)
    for bench in (roomy, short):
        requests = [bench.request(params_of(name)) for name in names]
        client, found = bench.llm.engine.client, dict[str, RequestOutput]()
        for request in requests:
            client.add(request, "")
        for step in range(3 * MAX_TOKENS):
            one = requests[step % len(requests)].request_id
            client.steer(one, priority=step % 3, pause_s=(0.0, None, None, 60.0)[step % 4])
            found |= {each.request_id: each for each in client.step() if each.finished}
        for request in requests:
            client.steer(request.request_id, pause_s=0.0)
        while len(found) < len(requests):
            found |= {each.request_id: each for each in client.step() if each.finished}
        assert {
            name: shown(found[request.request_id])
            for name, request in zip(names, requests, strict=True)
        } == {name: alone[name] for name in names}


def test_there_are_guesses(subject: Subject, guessing: Bench) -> None:
    steps: list[Stepped] = []
    core = guessing.llm.engine.client.core
    core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
    guessing.answers(subject.drafted, params_of("n"))
    tried, right = sum(s.num_draft_tokens for s in steps), sum(s.num_accepted for s in steps)
    assert tried >= right > 0  # all are right if earlier tests have had these answers


@pytest.mark.parametrize(
    "pairs",
    [
        *slow_but(THREE_PAIRS, *THREE_PAIRS[::12]),
        *(pytest.param((pair, pair), marks=pytest.mark.slow) for pair in PAIRS),
    ],
    ids=lambda pairs: ", ".join(map(" and ".join, pairs)),
)
def test_together(expected: Expected, short: Bench, pairs: tuple[Pair, ...]) -> None:
    """Or the two exclude each other, and it is said at once."""
    wanted = expected.of(*pairs)
    asked = [pair for pair in pairs if pair in wanted]
    found = short.answers(*(params_of(*pair) for pair in asked), params_of("n"))
    for pair, answer in zip(asked, found[:-1], strict=True):
        assert answer == wanted[pair], pair


def test_the_short_engine_preempts(subject: Subject, short: Bench) -> None:
    if subject.images is not None:
        pytest.skip("tests/engine/test_images.py preempts rows with images")
    params = [params_of("n"), params_of("regex"), params_of("json"), params_of("n", "regex")]
    outputs = short.outputs(*params)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
