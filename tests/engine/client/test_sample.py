"""Several samples of one request, without a core: updates come from the test."""

import numpy as np
import pytest

from quire.base.errors import STEP_FAILED
from quire.base.messages import Abort, Request
from quire.base.plan import Candidates
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.step_outputs import Failure, Finish, SequenceUpdate, StepOutputs
from quire.engine.client.output import OpenRequest, OutputProcessor
from quire.engine.client.request_maker import RequestMaker
from quire.render.generation import GenerationDefaults
from quire.render.renderer import RenderedPrompt
from tests.support.render.tiny_tokenizers import tokenizer

TOK = tokenizer("byte_level")
PROMPT = TOK.encode("Hello")
DOG, CAT, FOX = (TOK.encode(word) for word in (" dog", " cat", " fox"))
STOP = TOK.encode("!")
BROKEN = Finish("error", error=Failure(STEP_FAILED, "broken"))
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def part(
    index: int, token_ids: list[int], finish: Finish | str | None = None, **more: object
) -> SequenceUpdate:
    end = Finish(finish) if isinstance(finish, str) else finish
    return SequenceUpdate("a", index, token_ids, end, **more)  # type: ignore[arg-type]


def scored(index: int, logprob: float, finish: str | None = None) -> SequenceUpdate:
    """One token with its log-probability; the token names the sample."""
    candidates = Candidates(np.array([index], np.int32), np.array([logprob], np.float32), 3)
    return part(index, [index], finish, candidates=[candidates])


class Client:
    """One request. Each call of `step` is one step of the core and advances now_s by one."""

    def __init__(self, **params: object) -> None:
        maker = RequestMaker(TOK, GenerationDefaults(), 0)
        wanted = SamplingParams(**params)  # type: ignore[arg-type]
        self.request: Request = maker.make(RenderedPrompt(PROMPT, "Hello"), wanted, "a")
        self.processor = OutputProcessor()
        self.processor.add(self.request, "Hello", TOK, arrival_s=1.0)
        self.now_s = 1.0
        self.aborts: list[Abort] = []

    def step(self, *parts: SequenceUpdate) -> RequestOutput | None:
        request = self.take(*parts)
        return None if request is None else request.output()

    def take(self, *parts: SequenceUpdate) -> OpenRequest | None:
        """Process a step without reading its output. Return the request if it has output."""
        self.now_s += 1
        ready, aborts = self.processor.process(StepOutputs(details=[*parts]), self.now_s)
        self.aborts += aborts
        assert len(ready) <= 1, "one output per request and step"
        return ready[0] if ready else None

    def last(self, *parts: SequenceUpdate) -> RequestOutput:
        output = self.step(*parts)
        assert output is not None and output.finished
        assert "a" not in self.processor and len(self.processor) == 0
        return output


def texts(output: RequestOutput | None) -> dict[int, str]:
    assert output is not None
    return {completion.index: completion.text for completion in output.outputs}


def test_cumulative_outputs_contain_all_samples() -> None:
    client = Client(n=3)
    assert texts(client.step(part(1, CAT))) == {0: "", 1: " cat", 2: ""}
    output = client.step(part(0, DOG), part(1, DOG, "length"), part(2, FOX))
    assert texts(output) == {0: " dog", 1: " cat dog", 2: " fox"}
    assert output is not None and not output.finished
    assert [o.finish_reason for o in output.outputs] == [None, "length", None]
    output = client.last(part(0, CAT, "length"), part(2, STOP, Finish("stop", STOP[0])))
    assert texts(output) == {0: " dog cat", 1: " cat dog", 2: " fox"}
    assert [o.finish_reason for o in output.outputs] == ["length", "length", "stop"]
    assert [o.token_ids for o in output.outputs] == [DOG + CAT, CAT + DOG, FOX + STOP]
    assert client.aborts == []


def test_deltas_contain_only_samples_that_changed() -> None:
    client = Client(n=3, output_kind=DELTA)
    assert texts(client.step(part(0, DOG), part(2, FOX))) == {0: " dog", 2: " fox"}
    output = client.step(part(1, CAT, "length"), part(2, CAT))
    assert texts(output) == {1: " cat", 2: " cat"} and output and not output.finished
    assert texts(client.step(part(0, FOX))) == {0: " fox"}, "the end of a sample is reported once"
    assert texts(client.step(part(0, [], "abort"))) == {0: ""}
    output = client.last(part(2, DOG, "length"))
    assert texts(output) == {2: " dog"} and output.outputs[0].token_ids == DOG


def test_final_output_waits_for_all_samples() -> None:
    client = Client(n=2, output_kind=FINAL)
    assert client.step(part(0, DOG), part(1, CAT, "length")) is None
    output = client.last(part(0, DOG, "length"))
    assert texts(output) == {0: " dog dog", 1: " cat"}
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.first_token_s, metrics.finished_s) == (2.0, 3.0)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_string_ends_only_its_own_sample(kind: RequestOutputKind) -> None:
    """The abort names the sample; the core's later updates of that sample are dropped."""
    client = Client(n=2, stop="STOP", output_kind=kind)
    outputs = [client.step(part(0, DOG), part(1, TOK.encode(" STOP")))]
    assert client.aborts == [Abort("a", "stop", index=1)]
    outputs.append(client.step(part(0, CAT), part(1, FOX)))
    outputs.append(client.step(part(1, FOX)))
    assert outputs[-1] is None, "the ended sample has no new output"
    outputs.append(client.last(part(0, TOK.encode(" STOP"))))
    assert client.aborts == [Abort("a", "stop", index=1), Abort("a", "stop", index=0)]
    got = [output for output in outputs if output is not None]
    shown = {0: "", 1: ""}
    for output in got if kind is DELTA else got[-1:]:
        shown = {i: text + texts(output).get(i, "") for i, text in shown.items()}
    assert shown == {0: " dog cat ", 1: " "}
    ends = {o.index: (o.finish_reason, o.stop_reason) for output in got for o in output.outputs}
    assert ends == {0: ("stop", "STOP"), 1: ("stop", "STOP")}


def test_stop_string_in_the_last_tokens_sends_no_abort() -> None:
    client = Client(n=2, stop="STOP", output_kind=FINAL)
    client.step(part(0, TOK.encode(" STOP now"), "length"))
    output = client.last(part(1, DOG, "length"))
    assert client.aborts == []
    assert [o.finish_reason for o in output.outputs] == ["stop", "length"]


def test_best_of_returns_the_best_samples_in_order() -> None:
    client = Client(n=2, best_of=4)
    for step in range(2):
        ends = "length" if step else None
        parts = [scored(i, p, ends) for i, p in enumerate((-2.0, -0.5, -3.0, -1.0))]
        output = client.step(*parts[:3])
        assert output is None, "the best samples are not known yet"
        output = client.step(parts[3])
    assert output is not None and output.finished
    assert [(o.index, o.token_ids) for o in output.outputs] == [(0, [1, 1]), (1, [3, 3])]
    assert [o.cumulative_logprob for o in output.outputs] == [-1.0, -2.0]
    assert [o.logprobs for o in output.outputs] == [None, None], "logprobs are not requested"
    assert output.metrics is not None and output.metrics.num_dropped_tokens == 4


def test_best_of_returns_logprobs_if_requested() -> None:
    client = Client(n=1, best_of=2, logprobs=0)
    assert client.request.params.logprobs == 0 and not client.request.hides_logprobs
    output = client.last(scored(0, -2.0, "length"), scored(1, -0.5, "length"))
    [best] = output.outputs
    assert best.token_ids == [1] and best.logprobs is not None
    assert [entry[1].logprob for entry in best.logprobs] == [-0.5]


def test_best_of_keeps_the_order_of_equal_samples() -> None:
    client = Client(n=2, best_of=3)
    output = client.last(*[scored(i, -1.0, "length") for i in (2, 1, 0)])
    assert [o.token_ids for o in output.outputs] == [[0], [1]]


def test_best_of_requests_hidden_logprobs_from_the_core() -> None:
    ranked = Client(n=1, best_of=2).request
    assert (ranked.params.logprobs, ranked.hides_logprobs) == (0, True)
    for params in ({"n": 2}, {"n": 2, "best_of": 2}):
        request = Client(**params).request
        assert (request.params.logprobs, request.hides_logprobs) == (None, False)
    given = SamplingParams(best_of=2)
    RequestMaker(TOK, GenerationDefaults(), 0).make(RenderedPrompt(PROMPT, None), given)
    assert given.logprobs is None, "the caller's parameters are unchanged"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_error_ends_all_samples(kind: RequestOutputKind) -> None:
    client = Client(n=3, output_kind=kind)
    client.step(part(0, DOG), part(1, CAT, "length"))
    output = client.last(part(0, [], BROKEN), part(2, [], BROKEN))
    ends = {o.index: (o.finish_reason, o.stop_reason, o.error) for o in output.outputs}
    broken = "error", None, BROKEN.error
    wanted = {0: broken, 1: ("length", None, None), 2: broken}
    if kind is DELTA:
        del wanted[1]  # was reported before
    assert ends == wanted
    assert client.step(part(2, [], BROKEN)) is None and client.aborts == []


def test_best_of_returns_the_error_of_a_failed_sample() -> None:
    client = Client(n=1, best_of=3)
    client.step(scored(0, -0.1, "length"), scored(1, -2.0))
    output = client.last(part(2, [], BROKEN))
    [shown] = output.outputs
    assert (shown.finish_reason, shown.error) == ("error", BROKEN.error)


def test_abort_ends_all_samples_with_their_partial_text() -> None:
    client = Client(n=2, stop="STOP")
    client.step(part(0, TOK.encode("a ST")), part(1, DOG, "length"))
    [request] = client.processor.abort(["a"], now_s=9.0)
    output = request.output()
    assert texts(output) == {0: "a ST", 1: " dog"} and output.finished
    assert [o.finish_reason for o in output.outputs] == ["abort", "length"]


def test_preemptions_of_all_samples_are_counted() -> None:
    client = Client(n=2, output_kind=FINAL)
    client.step(part(0, DOG, num_preemptions=1), part(1, DOG, num_preemptions=2))
    output = client.last(part(0, DOG, "length"), part(1, DOG, "length", num_preemptions=3))
    assert output.metrics is not None and output.metrics.num_preemptions == 4


def test_prompt_logprobs_are_returned_once() -> None:
    client = Client(n=2, prompt_logprobs=0, output_kind=DELTA)
    rows = [Candidates(np.array([t], np.int32), np.array([-1.0], np.float32), 1) for t in PROMPT]
    output = client.step(part(0, DOG, prompt_candidates=rows[1:]), part(1, CAT))
    assert output is not None and len(output.prompt_logprobs or ()) == len(PROMPT)
    output = client.step(part(1, CAT))
    assert output is not None and output.prompt_logprobs is None


def test_slow_reader_gets_one_merged_delta_per_sample() -> None:
    parts = [
        (scored(0, -1.0), scored(2, -2.0)),
        (scored(2, -3.0, "length"),),
        (scored(0, -4.0, "length"), scored(1, -5.0, "length")),
    ]
    fast, slow, early = (Client(n=3, output_kind=DELTA, logprobs=0) for _ in range(3))
    outputs = [output for step in parts if (output := fast.step(*step)) is not None]
    assert [len(output.outputs) for output in outputs] == [2, 1, 2]
    requests = [slow.take(*step) for step in parts]
    assert requests[-1] is not None
    whole = requests[-1].output()
    assert whole.finished and [o.index for o in whole.outputs] == [0, 1, 2]
    assert [o.token_ids for o in whole.outputs] == [[0, 0], [1], [2, 2]]
    assert [len(o.logprobs or ()) for o in whole.outputs] == [2, 1, 2]
    assert [o.cumulative_logprob for o in whole.outputs] == [-5.0, -5.0, -5.0]
    early.take(*parts[0])
    request = early.take(*parts[1])
    assert request is not None
    output = request.output()
    assert [o.index for o in output.outputs] == [0, 2] and not output.finished
    assert [o.finish_reason for o in output.outputs] == [None, "length"]
    assert [o.token_ids for o in output.outputs] == [[0], [2, 2]]
