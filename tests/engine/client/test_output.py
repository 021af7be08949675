"""The output processor: from the core's updates to the user's outputs, without a core."""

from typing import Any

import numpy as np
import pytest

from quire.base.errors import STEP_FAILED, RequestError
from quire.base.messages import Abort, Request
from quire.base.plan import Candidates, TokenValues
from quire.base.requests.outputs import Logprob, RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.step_outputs import Failure, Finish, SequenceUpdate, StepOutputs
from quire.engine.client.output import OutputProcessor
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.tiny_tokenizers import tokenizer

TOK = tokenizer("byte_level")
EOS = TOK.eos_token_id or 0
PROMPT = TOK.encode("Hello")
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Client:
    """One request whose updates come from the test. now_s grows by one with each step."""

    def __init__(self, params: SamplingParams, tok: Tokenizer | None = TOK) -> None:
        self.processor = OutputProcessor()
        self.processor.add(Request("a", PROMPT, params, seed=0), "Hello", tok, arrival_s=1.0)
        self.now_s = 1.0
        self.aborts: list[Abort] = []

    def step(
        self, token_ids: list[int], finish: Finish | str | None = None, **more: object
    ) -> RequestOutput | None:
        self.now_s += 1
        end = Finish(finish) if isinstance(finish, str) else finish
        update = SequenceUpdate("a", 0, token_ids, end, **more)  # type: ignore[arg-type]
        ready, aborts = self.processor.process(StepOutputs(details=[update]), self.now_s)
        self.aborts += aborts
        return ready[0].output() if ready else None


def run(
    params: SamplingParams, token_ids: list[int], finish: str = "length"
) -> list[RequestOutput]:
    """Return the outputs of steps with one token each."""
    client = Client(params)
    last = len(token_ids) - 1
    outputs = [client.step([t], finish if i == last else None) for i, t in enumerate(token_ids)]
    return [output for output in outputs if output is not None]


def test_every_output_kind_returns_the_whole_answer() -> None:
    ids = TOK.encode(" naïve 🙂 dog")
    whole = run(SamplingParams(), ids)
    parts = run(SamplingParams(output_kind=DELTA), ids)
    final = run(SamplingParams(output_kind=FINAL), ids)
    assert [len(o.outputs[0].token_ids) for o in whole] == list(range(1, len(ids) + 1))
    assert all(
        o.outputs[0].text.startswith(p.outputs[0].text)
        for p, o in zip(whole, whole[1:], strict=False)
    )
    assert [t for o in parts for t in o.outputs[0].token_ids] == ids
    assert "".join(o.outputs[0].text for o in parts) == " naïve 🙂 dog"
    assert len(final) == 1
    for output in (whole[-1], final[0]):
        done = output.outputs[0]
        assert (done.text, done.token_ids) == (" naïve 🙂 dog", ids)
        assert (done.finish_reason, done.stop_reason, output.finished) == ("length", None, True)
    assert not whole[0].finished and not whole[0].outputs[0].finished()
    assert (final[0].prompt, final[0].prompt_token_ids) == ("Hello", PROMPT)


def test_earlier_outputs_do_not_change() -> None:
    first, *_ = run(SamplingParams(), TOK.encode(" dog dog"))
    assert len(first.outputs[0].token_ids) == 1


@pytest.mark.parametrize("kind", [None, DELTA])
def test_ended_samples_return_their_routed_experts(kind: RequestOutputKind | None) -> None:
    """The values are joined once: later outputs share the array. Open samples return none."""
    kinds = {} if kind is None else {"output_kind": kind}
    client = Client(SamplingParams(n=2, **kinds))  # type: ignore[arg-type]
    size = len(PROMPT)

    def values(first: int, *numbers: int) -> TokenValues:
        return TokenValues(first, (1, 1), np.array(numbers, np.int16))

    updates = [
        SequenceUpdate("a", 0, [5], token_values=values(0, *range(size))),
        SequenceUpdate("a", 1, [6]),
        SequenceUpdate("a", 0, [7], Finish("length"), token_values=values(size, 50)),
        SequenceUpdate("a", 1, [8], token_values=values(size, 60)),
        SequenceUpdate("a", 1, [9], Finish("length"), token_values=values(size + 1, 70)),
    ]
    found: dict[int, list[Any]] = {0: [], 1: []}
    for update in updates:
        ready, _ = client.processor.process(StepOutputs(details=[update]), 2.0)
        for sample in ready[0].output().outputs:
            assert (sample.routed_experts is None) == (sample.finish_reason is None)
            if sample.routed_experts is not None:
                found[sample.index].append(sample.routed_experts)
    assert [len(each) for each in found.values()] == ([3, 1] if kind is None else [1, 1])
    assert all(each is found[0][0] for each in found[0])
    assert found[0][0].ravel().tolist() == [*range(size), 50]
    assert found[1][0].ravel().tolist() == [*range(size), 60, 70]


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_in_the_ids_and_its_text_is_optional(include: bool) -> None:
    """The text needs include_stop_str_in_output; a special token also skip_special_tokens=False."""
    params = SamplingParams(include_stop_str_in_output=include, output_kind=FINAL)
    dog = TOK.encode(" dog")
    done = run(params, [*dog, EOS], "stop")[0].outputs[0]
    assert (done.token_ids, done.text, done.stop_reason) == ([*dog, EOS], " dog", None)
    client = Client(params)
    stop_id = TOK.encode("!")[0]
    output = client.step([*dog, stop_id], Finish("stop", stop_id))
    assert output is not None
    done = output.outputs[0]
    assert (done.text, done.stop_reason) == (" dog!" if include else " dog", stop_id)
    params.skip_special_tokens = False
    shown = run(params, [*dog, EOS], "stop")[0].outputs[0].text
    assert shown == (" dog<|im_end|>" if include else " dog")


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_aborts_and_drops_the_rest(include: bool) -> None:
    ids = TOK.encode(" one STOP two")
    params = SamplingParams(stop=["STOP"], include_stop_str_in_output=include, output_kind=DELTA)
    client = Client(params)
    outputs = [client.step([token_id]) for token_id in ids]
    got = [o for o in outputs if o is not None]
    assert "".join(o.outputs[0].text for o in got) == (" one STOP" if include else " one ")
    last = got[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")
    assert client.aborts == [Abort("a", "stop")]
    assert len(got) < len(ids) and "a" not in client.processor and len(client.processor) == 0


def test_stop_string_within_the_last_step_cuts_its_tokens() -> None:
    """The core has ended the request itself, so there is no abort. Later tokens are dropped."""
    ids = TOK.encode(" one STOP two")
    client = Client(SamplingParams(stop="STOP"))
    output = client.step(ids, "length")
    assert output is not None
    done = output.outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == (" one ", "stop", "STOP")
    assert done.token_ids == ids[: len(done.token_ids)] and len(done.token_ids) < len(ids)
    assert client.aborts == []


def test_min_tokens_keeps_early_stop_strings() -> None:
    ids = TOK.encode(" STOP a STOP")
    params = SamplingParams(stop="STOP", min_tokens=len(TOK.encode(" STOP")), output_kind=FINAL)
    assert run(params, ids)[-1].outputs[0].text == " STOP a "


def test_possible_stop_string_is_held_back_until_the_end() -> None:
    ids = TOK.encode(" ST")
    outputs = run(SamplingParams(stop="STOP", output_kind=DELTA), ids)
    assert "".join(o.outputs[0].text for o in outputs) == " ST"
    assert all("S" not in o.outputs[0].text for o in outputs[:-1])


def test_incomplete_character_is_returned_only_at_the_end() -> None:
    half = TOK.encode("🙂")[:-1]
    *early, last = run(SamplingParams(output_kind=DELTA), half)
    assert all(o.outputs[0].text == "" for o in early)
    assert last.outputs[0].text == TOK.decode(half)


@pytest.mark.parametrize("tok", [TOK, None])
def test_output_without_detokenization_has_ids_and_logprobs(tok: Tokenizer | None) -> None:
    client = Client(SamplingParams(detokenize=tok is None, logprobs=0, prompt_logprobs=0), tok)
    output = client.step([5], "length", candidates=[row(5)], prompt_candidates=[row(1)])
    assert output is not None and output.outputs[0].text == ""
    assert output.outputs[0].logprobs == [{5: Logprob(-0.5, 1, None)}]
    assert output.prompt_logprobs == [None, {1: Logprob(-0.5, 1, None)}]


def row(*token_ids: int, rank: int = 1) -> Candidates:
    """Return candidates, the chosen token first; log-probabilities fall in steps of a half."""
    logprobs = -0.5 * np.arange(1, len(token_ids) + 1)
    return Candidates(np.array(token_ids, np.int32), logprobs.astype(np.float32), rank)


def test_logprobs_have_ranks_and_decoded_tokens() -> None:
    dog, cat, fox = (TOK.encode(word)[0] for word in (" dog", "a", "b"))
    client = Client(SamplingParams(logprobs=2))
    client.step([fox], candidates=[row(fox, dog, cat, EOS, rank=9)])
    output = client.step([dog], candidates=[row(dog, dog, EOS)])
    assert output is not None
    first, second = output.outputs[0].logprobs or []
    assert list(first) == [fox, dog, cat]  # only two alternatives are requested
    assert [entry.rank for entry in first.values()] == [9, 1, 2]
    assert [entry.decoded_token for entry in first.values()] == ["b", TOK.decode([dog]), "a"]
    assert list(second) == [dog, EOS]
    assert (second[dog].rank, second[EOS].rank) == (1, 2)
    assert second[EOS].decoded_token == "<|im_end|>"
    assert output.outputs[0].cumulative_logprob == pytest.approx(-1.0)
    last = client.step([EOS], "stop", candidates=[row(EOS)])
    assert last is not None and len(last.outputs[0].logprobs or []) == 3


def test_deltas_return_logprobs_of_the_whole_vocabulary() -> None:
    client = Client(SamplingParams(logprobs=-1, output_kind=DELTA))
    client.step([3], candidates=[row(3, *range(10))])
    output = client.step([4], candidates=[row(4, *range(10))])
    assert output is not None and output.outputs[0].logprobs is not None
    assert [set(entry) for entry in output.outputs[0].logprobs] == [set(range(10))]
    assert output.outputs[0].token_ids == [4]


def test_decoded_tokens_join_to_the_text() -> None:
    """A part of a character has no text; the token that completes it has the character."""
    ids = TOK.encode("a🙂é")
    client = Client(SamplingParams(logprobs=0))
    output = client.step(ids, "length", candidates=[row(token_id) for token_id in ids])
    assert output is not None
    found = [
        entry[i].decoded_token
        for entry, i in zip(output.outputs[0].logprobs or [], ids, strict=True)
    ]
    assert "".join(text or "" for text in found) == output.outputs[0].text == "a🙂é"
    assert all("\ufffd" not in (text or "") for text in found)


def test_prompt_logprobs_of_several_steps_are_returned_once() -> None:
    assert len(PROMPT) >= 3
    client = Client(SamplingParams(prompt_logprobs=1, output_kind=DELTA))
    parts = [row(token_id, EOS) for token_id in PROMPT[1:]]
    assert client.step([], prompt_candidates=parts[:1]) is None
    output = client.step([7], prompt_candidates=[*parts[1:], row(0)])
    assert output is not None and output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
    texts = [list(entry.values())[0].decoded_token for entry in output.prompt_logprobs[1:] if entry]
    assert TOK.decode(PROMPT[:1]) + "".join(map(str, texts)) == "Hello"
    later = client.step([8], "length")
    assert later is not None and later.prompt_logprobs is None


def test_output_reports_times_preemptions_and_cached_tokens() -> None:
    client = Client(SamplingParams())
    client.step([], num_cached_tokens=4)
    client.step([5], num_cached_tokens=4)
    output = client.step([6], "length", num_preemptions=2)
    assert output is not None and output.metrics is not None
    metrics = output.metrics
    times = (metrics.arrival_s, metrics.first_token_s, metrics.finished_s)
    assert times == (1.0, 3.0, 4.0)
    assert metrics.num_preemptions == 2 and output.num_cached_tokens == 4


def test_abort_and_error_end_the_request() -> None:
    client = Client(SamplingParams(stop="STOP"))
    client.step(TOK.encode("a ST"))
    (request,) = client.processor.abort(["a", "nobody"], now_s=9.0)
    output = request.output()
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a ST", "abort")
    assert client.step([1]) is None and client.aborts == []
    client = Client(SamplingParams(output_kind=FINAL))
    failure = Failure(STEP_FAILED, "the step failed")
    failed = client.step([], Finish("error", error=failure))
    assert failed is not None and failed.finished
    done = failed.outputs[0]
    assert (done.finish_reason, done.stop_reason, done.error) == ("error", None, failure)
    assert client.aborts == []


def test_duplicate_request_id_is_rejected() -> None:
    client = Client(SamplingParams())
    with pytest.raises(RequestError, match="in use"):
        client.processor.add(Request("a", [1], SamplingParams(), seed=0), None, TOK, 0.0)


def test_stream_interval_groups_all_tokens_but_the_first() -> None:
    """With one token per step, with several, and at the end."""
    outputs = run(SamplingParams(output_kind=DELTA, stream_interval=3), list(range(5, 13)))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3, 3, 1]
    whole = run(SamplingParams(stream_interval=3), list(range(5, 13)))
    assert [len(output.outputs[0].token_ids) for output in whole] == [1, 4, 7, 8]
    client = Client(SamplingParams(output_kind=DELTA, stream_interval=3))
    sizes = [client.step([5] * count) for count in (2, 2, 2, 5)]
    assert [None if o is None else len(o.outputs[0].token_ids) for o in sizes] == [2, None, 4, 5]


def test_metrics_have_times_and_token_counts() -> None:
    [output] = run(SamplingParams(output_kind=FINAL), [5, 6, 7])
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.arrival_s, metrics.first_token_s, metrics.last_token_s) == (1.0, 2.0, 4.0)
    assert (metrics.finished_s, metrics.num_generation_tokens) == (4.0, 3)
