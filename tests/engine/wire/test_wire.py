"""Every message on the wire arrives as it was sent, however the stream is split."""

import numpy as np
import pytest

from quire.base.errors import EngineError
from quire.base.messages import (
    Abort,
    GetMetrics,
    Metrics,
    Ready,
    Refused,
    Request,
    ResetPrefixCache,
)
from quire.base.plan import Candidates
from quire.base.prefix import PrefixReport
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import (
    BeamOutput,
    Failure,
    Finish,
    RowName,
    SequenceUpdate,
    StepOutputs,
)
from quire.engine.wire.wire import LENGTH, MAX_MESSAGE_BYTES, Frames, client_codec, core_codec

PARAMS = SamplingParams(
    temperature=0.7, stop=["end", "."], logit_bias={3: -1.5}, seed=-5, logprobs=2, max_tokens=None
)
TO_CORE = [
    Request("r1", [1, 2, 3], PARAMS, seed=-(2**63), stop_token_ids=(7,), cache_salt="s"),
    Request("r5", [4], PARAMS, seed=1, grammar="start: /[a-z]+/"),
    Request("r4", [4], SamplingParams(n=2, best_of=3), seed=1, hides_logprobs=True),
    Abort("r1", "stop"),
    Abort("r4", "stop", index=1),
    ResetPrefixCache(),
    GetMetrics(4),
]
FROM_CORE = [
    Ready(1, 100, 64, 20, 4, {"model": "demo", "max_num_seqs": 4, "kv": None}, "memory"),
    Refused("r3", "too long"),
    Refused("r4", "no room", True, "n"),
    Refused("r5", "too long", False, "prompt", "context_length_exceeded"),
    Metrics(4, "# HELP"),
]


@pytest.mark.parametrize("step", [1, 2, 7, 100_000])
def test_messages_survive_any_split(step: int) -> None:
    for messages, there, back in (
        (TO_CORE, client_codec(), core_codec()),
        (FROM_CORE, core_codec(), client_codec()),
    ):
        stream = b"".join(there.encode(message) for message in messages)
        frames, received = Frames(), []
        for at in range(0, len(stream), step):
            received += [back.decode(body) for body in frames.feed(stream[at : at + step])]
        assert received == messages


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_outputs_survive_any_split(step: int) -> None:
    """This covers tokens in columns and detailed updates of single sequences."""
    rows, token_ids = np.array([3, 0], np.int32), np.array([2**31 - 1, 6], np.int32)
    names = [RowName(3, "r1", 0, 16), RowName(0, "r1", 1, 0)]
    broken = Finish("error", error=Failure("step_failed", "no"))
    details = [
        SequenceUpdate("r1", token_ids=[5], finish=Finish("stop", 5), num_cached_tokens=16),
        SequenceUpdate("r1", 1, finish=Finish("stop", "end"), prefix=PrefixReport(16)),
        SequenceUpdate("r2", finish=broken, num_preemptions=2),
        SequenceUpdate("r3", beams=[BeamOutput([1, 2], -0.5, -1.0, Finish("length"))]),
    ]
    stream = core_codec().encode(StepOutputs(rows, token_ids, names, details))
    frames, received = Frames(), []
    for at in range(0, len(stream), step):
        received += [client_codec().decode(b) for b in frames.feed(stream[at : at + step])]
    [got] = received
    assert isinstance(got, StepOutputs)
    assert (got.names, got.details) == (names, details)
    for mine, sent in ((got.rows, rows), (got.token_ids, token_ids)):
        assert mine.dtype == np.int32 and mine.tobytes() == sent.tobytes()


def test_candidates_keep_bits_and_dtypes() -> None:
    logprobs = np.array([-0.1, -np.inf, -3.4028235e38], np.float32)
    candidates = Candidates(np.array([5, 0, 2**31 - 1], np.int32), logprobs, 17)
    sent = StepOutputs(details=[SequenceUpdate("r", token_ids=[5], candidates=[candidates])])
    body = core_codec().encode(sent)[LENGTH.size :]
    received = client_codec().decode(body)
    assert isinstance(received, StepOutputs) and received.details[0].candidates is not None
    [got] = received.details[0].candidates
    assert got.rank == 17
    assert got.token_ids.dtype == np.int32 and got.logprobs.dtype == np.float32
    assert got.token_ids.tobytes() == candidates.token_ids.tobytes()
    assert got.logprobs.tobytes() == logprobs.tobytes()


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa5Abort", b"\x81\xa4type\xa6Nobody"]
)
def test_unknown_messages_are_rejected(body: bytes) -> None:
    with pytest.raises(EngineError, match="not quire's"):
        core_codec().decode(body)


def test_message_for_the_other_direction_is_rejected() -> None:
    body = client_codec().encode(GetMetrics(1))[LENGTH.size :]
    with pytest.raises(EngineError):
        client_codec().decode(body)


def test_parameters_are_validated_on_receipt() -> None:
    good = client_codec().encode(TO_CORE[0])[LENGTH.size :]
    forged = good.replace(np.array([0.7], ">f8").tobytes(), np.array([-3.0], ">f8").tobytes())
    assert forged != good
    with pytest.raises(EngineError, match="temperature"):
        core_codec().decode(forged)


def test_message_above_the_maximum_length_is_rejected() -> None:
    with pytest.raises(EngineError, match="longer than the wire allows"):
        list(Frames().feed(LENGTH.pack(MAX_MESSAGE_BYTES + 1)))


def test_deeply_nested_message_is_rejected() -> None:
    """msgspec raises RecursionError for it, which is not one of its own errors."""
    deep = b"\x91" * 100_000 + b"\xc0"
    request = b"\x81\xa4type" + deep  # {"type": [[[...]]]}
    for codec in (core_codec(), client_codec()):
        for body in (deep, request, b"\x82\xa4type\xa5Abort\xa1x" + deep):
            with pytest.raises(EngineError, match="not quire's"):
                codec.decode(body)
