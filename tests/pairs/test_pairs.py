"""Every pair of what a request may ask for: side by side, and together in one request.

Side by side neither may change what the other gets. Together the answer is the same in an engine
with room and one step at a time, and in one that is always short of memory, cuts prompts into
chunks and is a step ahead.
"""

from collections.abc import Iterator
from contextlib import suppress
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
from quire.base.outputs import RequestOutput
from quire.engine.drafting.draft_pace import StepTimes
from quire.render.renderer import RenderedPrompt
from tests.support.models.eagle_heads import write_demo_head
from tests.support.models.reference_checkpoints import shallow

Pair = tuple[str, str]
PROMPT = "Once upon a time there was a little fox. One day the fox"
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


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    plain = {"method": "none"}  # nor are tokens tried that a grammar forces
    settings = {"max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20, "speculative_config": plain}
    with engine(**settings) as made:
        yield made


@pytest.fixture(scope="module")
def short() -> Iterator[LLM]:
    """A pool that a request for three and its neighbours do not fit into."""
    with engine(
        max_num_seqs=8, kv_cache_memory_bytes=6 * block_bytes(), max_num_batched_tokens=8,
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


@pytest.fixture(scope="module", params=GUESSES)
def guessing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """Short of memory, and it tries what followed the last tokens before: often it is wrong. How
    long steps take is not looked at, so that it guesses on any machine."""
    settings = {"method": request.param, **GUESSES[request.param]}
    depth = 2 if request.param == "ngram, by the device" else 1
    if request.param == "eagle3":
        settings["model"] = str(tmp_path_factory.mktemp("head"))
        write_demo_head(Path(settings["model"]))
    num_blocks = 8
    if request.param == "draft_model":  # whose four layers have blocks besides
        settings["model"], num_blocks = str(shallow("demo", 4)), 14
    with pytest.MonkeyPatch.context() as patch, engine(
        max_num_seqs=8, kv_cache_memory_bytes=num_blocks * block_bytes(), max_num_batched_tokens=16,
        speculative_config=settings, pipeline_depth=depth,
    ) as made:  # fmt: skip
        patch.setattr(StepTimes, "observe", lambda *_: None)
        yield made


def engine(**settings: Any) -> LLM:
    return LLM("demo", max_model_len=64, dtype="float32", disable_log_stats=True, **settings)


def block_bytes() -> int:
    with engine(kv_cache_memory_bytes=8 << 20) as made:
        return (8 << 20) // made.engine.memory.num_blocks[0]


def shown(output: RequestOutput) -> Any:
    """All that a client gets, with log-probabilities to the bit. A grammar and others' wishes may
    leave no token; no step fails."""
    assert STEP_FAILED not in {c.error.code for c in output.outputs if c.error is not None}
    choices = [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.cumulative_logprob, c.logprobs)
        for c in output.outputs
    ]
    return choices, output.prompt_logprobs


def answers(llm: LLM, *params: SamplingParams) -> list[Any]:
    prompts = [PROMPT] * len(params)
    return [shown(output) for output in llm.generate(prompts, list(params), use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(roomy: LLM) -> dict[str, Any]:
    return {name: answers(roomy, params_of(name))[0] for name in FEATURES}


class Expected:
    """What requests for two features get in an engine with room; each is asked once."""

    def __init__(self, roomy: LLM) -> None:
        self._roomy = roomy
        self._found: dict[Pair, Any] = {}

    def of(self, *pairs: Pair) -> dict[Pair, Any]:
        """Return the answers of those pairs that do not exclude each other."""
        asked: dict[Pair, SamplingParams] = {}
        for pair in pairs:
            with suppress(RequestError):
                asked[pair] = params_of(*pair)
        new = {pair: params for pair, params in asked.items() if pair not in self._found}
        self._found |= zip(new, answers(self._roomy, *new.values()), strict=True)
        return {pair: self._found[pair] for pair in asked}


@pytest.fixture(scope="module")
def expected(roomy: LLM) -> Expected:
    return Expected(roomy)


@pytest.mark.parametrize(
    "names",
    [*groups_of_four(), *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS)],
    ids=", ".join,
)
def test_side_by_side(roomy: LLM, alone: dict[str, Any], names: tuple[str, ...]) -> None:
    found = answers(roomy, *map(params_of, names))
    assert dict(zip(names, found, strict=True)) == {name: alone[name] for name in names}


@pytest.mark.parametrize("names", THREES, ids=", ".join)
def test_guesses_change_nothing(
    guessing: LLM, alone: dict[str, Any], names: tuple[str, ...]
) -> None:
    greedy = params_of("greedy", "ignore_eos")
    found = answers(guessing, *map(params_of, names), greedy)
    assert dict(zip(names, found[:-1], strict=True)) == {name: alone[name] for name in names}


@pytest.mark.parametrize("form", ["json", pytest.param("regex", marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", THREES, ids=", ".join)
def test_guesses_at_an_answer_with_a_form_change_nothing(
    expected: Expected, guessing: LLM, names: tuple[str, ...], form: str
) -> None:
    """Those that its grammar forces, and others."""
    wanted = expected.of(*((form, name) for name in names))
    params = [params_of(*pair) for pair in wanted]
    found = answers(guessing, *params, params_of("greedy", "ignore_eos"))
    assert dict(zip(wanted, found[:-1], strict=True)) == wanted


@pytest.mark.parametrize("one", FEATURES)
def test_a_fork_changes_nothing(roomy: LLM, short: LLM, alone: dict[str, Any], one: str) -> None:
    """Of what is held, at the end of the prompt, with room and without."""
    tokens = roomy.get_tokenizer().encode(PROMPT)
    for llm in (roomy, short):
        client = llm.engine.client
        params = params_of(one)
        made = llm.engine.requests.make(RenderedPrompt(tokens, PROMPT), params_of("ignore_eos"))
        finished(llm, msgspec.structs.replace(made, keep_s=60.0))
        grammar = llm.engine.renderer.answer_grammar(params, RenderedPrompt(tokens, PROMPT))
        asked = llm.engine.requests.make(RenderedPrompt(tokens, PROMPT), params, grammar=grammar)
        fork = Fork(made.request_id, 0, len(tokens))
        assert shown(finished(llm, msgspec.structs.replace(asked, fork=fork))) == alone[one]
        client.keep(made.request_id, 0.0)


def finished(llm: LLM, request: Request) -> RequestOutput:
    """The last output of a request."""
    llm.engine.client.add(request, PROMPT)
    while True:
        for output in llm.engine.client.step():
            if output.finished:
                return output


def test_there_are_guesses(guessing: LLM) -> None:
    steps: list[Stepped] = []
    core = guessing.engine.client.core
    core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
    answers(guessing, params_of("greedy", "ignore_eos"), params_of("n"))
    tried, right = sum(s.num_guessed for s in steps), sum(s.num_accepted for s in steps)
    assert tried > right > 0


@pytest.mark.parametrize(
    "pairs",
    [*THREE_PAIRS, *(pytest.param((pair, pair), marks=pytest.mark.slow) for pair in PAIRS)],
    ids=lambda pairs: ", ".join(map(" and ".join, pairs)),
)
def test_together(expected: Expected, short: LLM, pairs: tuple[Pair, ...]) -> None:
    """Or the two exclude each other, and it is said at once."""
    wanted = expected.of(*pairs)
    asked = [pair for pair in pairs if pair in wanted]
    found = answers(short, *(params_of(*pair) for pair in asked), params_of("n"))
    for pair, answer in zip(asked, found[:-1], strict=True):
        assert answer == wanted[pair], pair


def test_the_short_engine_preempts(short: LLM) -> None:
    params = [params_of("n"), params_of("regex"), params_of("json"), params_of("n", "regex")]
    outputs = short.generate([PROMPT] * 4, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
