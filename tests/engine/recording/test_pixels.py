"""Recordings hold digests of images, and never their pixels."""

import msgspec
import numpy as np
import pytest

from quire.base.media.item import EncoderInput, MediaItem
from quire.base.messages import Request
from quire.base.plan import Plan
from quire.base.sampling_params import SamplingParams
from quire.engine.recording.calls import ADD, PLAN, CallEncoder, calls_of
from quire.engine.recording.redact import Redaction

PIXELS, TABLE = bytes(range(200)), bytes(range(100, 200)) * 2
ITEM = MediaItem(1, 2, b"d" * 32, grid=(1, 2), shape=(10, 20), pixels=PIXELS, table=TABLE)
REQUEST = Request("r", [5, 6, 6, 7], SamplingParams(), seed=1, media=(ITEM,))


@pytest.mark.parametrize("redaction", [None, Redaction()])
def test_requests_and_plans(redaction: Redaction | None) -> None:
    encoder = CallEncoder(redaction)
    plan = Plan(step_id=1, encoder_inputs=(EncoderInput(ITEM, np.arange(2, dtype=np.int32)),))
    items = [encoder.encode((ADD, 0.0, REQUEST)), encoder.encode((PLAN, plan))]
    written = msgspec.msgpack.encode(items)
    assert PIXELS not in written and TABLE not in written
    assert (ITEM.digest in written) == (redaction is None)
    [call] = calls_of([*msgspec.msgpack.decode(written), [8, "closed"]])
    [item] = call.value.media
    assert (item.start, item.num_tokens, item.grid) == (1, 2, (1, 2))
    assert len(item.pixels) <= 16  # a keyed digest of nothing, or nothing
