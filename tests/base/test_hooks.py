"""Actions of hooks: values out of range, and contexts without a request."""

import asyncio

import pytest

from quire.base.errors import RequestError
from quire.base.requests.hooks import HookContext, checked_pause, checked_priority


def test_pauses_and_priorities_out_of_range_are_rejected() -> None:
    assert checked_pause(0.5) == 0.5 and checked_priority(-5) == -5
    for seconds in (0, -1.0, 1e9, float("nan"), "1"):
        with pytest.raises(ValueError, match="a pause must be above 0 s and at most 600 s"):
            checked_pause(seconds)
    for priority in (2**31, 1.0, True, None):
        with pytest.raises(ValueError, match="priority must be an integer of 32 bits"):
            checked_priority(priority)


def test_actions_of_a_context_without_a_request_have_no_effect() -> None:
    actions = HookContext("", "", "").actions
    actions.pause(1.0)
    actions.set_priority(1)
    with pytest.raises(RequestError, match="only on a server"):
        asyncio.run(actions.ask("demo", "x"))
