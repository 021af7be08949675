"""Retained requests: their memory limit, requests retained by an earlier engine, and reported
changes."""

import msgspec
import pytest

from quire.base.errors import EngineBusy
from quire.base.messages import Hold, PutBack, Rewind
from quire.base.requests.media_items import MediaItem
from quire.scheduler.reuse import held as held_file
from quire.scheduler.reuse.held import RetainedChanges
from quire.scheduler.scheduler import Topic
from quire.scheduler.views import RetainedView
from tests.scheduler.test_held import PROMPT, HeldBench
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.pinning_core import MAX_LEN


@pytest.mark.parametrize("limit", [0, 1])
def test_a_running_request_is_retained_only_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(held_file, "MAX_RETAINED", limit)
    bench = HeldBench()
    bench.add("a", PROMPT)
    bench.step()
    bench.core.control(Hold("a", 9.0))
    bench.finish()
    assert len(bench.scheduler.held(0.0)) == limit
    bench.let_go()


def test_extending_the_hold_of_a_running_request_needs_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_file, "MAX_RETAINED", 1)
    bench = HeldBench()
    request = make_request("a", PROMPT, max_tokens=6)
    bench._send(msgspec.structs.replace(request, keep_s=9.0))
    bench.step()
    bench.core.control(Hold("a", 50.0))
    bench.finish()
    assert bench.held_of("a").keep_s == 50.0
    bench.let_go()


def test_the_limit_counts_tokens_of_all_sequences_and_the_tenant_s_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 tokens that may be retained, 16 are. A request adds 16 for each sequence."""
    monkeypatch.setattr(held_file, "MAX_RETAINED_TOKENS", 100)
    bench = HeldBench()
    bench.keep(tenant="one")
    holds = bench.scheduler.retained

    def check(n: int, share: float = 1.0, tenant: str = "one", max_tokens: int = 6) -> None:
        request = make_request("b", PROMPT, max_tokens=max_tokens, n=n, tenant=tenant)
        holds.check(msgspec.structs.replace(request, keep_s=9.0, pin_share=share))

    check(5)
    with pytest.raises(EngineBusy, match="16 tokens are retained or will be, and 96 more"):
        check(6)
    check(2, share=0.5)
    with pytest.raises(EngineBusy, match="16 tokens of your key .* 48 more .* 50 of 100"):
        check(3, share=0.5)
    check(3, share=0.5, tenant="two")
    check(2, share=0.5, max_tokens=7)
    with pytest.raises(EngineBusy, match="16 tokens of your key .* 36 more .* 50 of 100"):
        check(2, share=0.5, max_tokens=8)
    monkeypatch.setattr(held_file, "MAX_RETAINED", 3)
    check(1)
    with pytest.raises(EngineBusy, match="1 sequences of your key .* 1 more .* 1 of 3"):
        check(1, share=0.5)
    bench.let_go()


def test_the_limit_counts_the_tokens_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pixels stay in memory. Requests without images are still retained."""
    monkeypatch.setattr(held_file, "MAX_RETAINED_MEDIA_TOKENS", 8)
    bench = HeldBench()
    held = bench.keep()
    image = MediaItem(1, 3, bytes(32))
    held.request = held.request.with_media((image,))
    text = msgspec.structs.replace(make_request("b", PROMPT), keep_s=9.0)
    check = bench.scheduler.retained.check
    check(text.with_media((image,)))
    two = text.with_media((image, image.at(5)))
    with pytest.raises(EngineBusy, match="3 tokens of images are retained .* 6 more .* of 8"):
        check(two)
    held.request = held.request.with_media((image,) * 4)
    check(text)
    bench.let_go()


def test_the_limit_counts_an_unlimited_answer_up_to_the_model_s_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds = HeldBench().scheduler.retained
    request = make_request("a", PROMPT, max_tokens=None)
    for limit in (MAX_LEN, MAX_LEN - 1):
        monkeypatch.setattr(held_file, "MAX_RETAINED_TOKENS", limit)
        for each in (request, msgspec.structs.replace(request, is_open=True)):
            if limit == MAX_LEN:
                holds.check(each)
                continue
            with pytest.raises(EngineBusy, match=f"0 tokens are retained .* {MAX_LEN} more"):
                holds.check(each)


def test_the_limit_counts_running_requests_that_will_be_retained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_file, "MAX_RETAINED", 3)
    bench = HeldBench()
    bench.keep()
    running = make_request("runs", PROMPT, max_tokens=6)
    bench._send(msgspec.structs.replace(running, keep_s=9.0))
    bench.step()
    more = msgspec.structs.replace(make_request("more", PROMPT, max_tokens=6, n=2), keep_s=9.0)
    with pytest.raises(EngineBusy, match="2 sequences are retained or will be, and 2 more"):
        bench.core.add(more)
    bench.finish()
    bench.let_go()


def put_back(name: str, num_tokens: int, index: int = 0) -> PutBack:
    return PutBack(name, index, list(range(num_tokens)), 1, 60.0, 50.0, tenant="", cache_salt="")


def test_requests_of_an_earlier_engine_are_put_back_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 40 tokens that may be retained, 16 are: 24 are put back, and one more is not."""
    monkeypatch.setattr(held_file, "MAX_RETAINED_TOKENS", 40)
    bench = HeldBench()
    bench.keep()
    for num_tokens, num_held in ((25, 1), (24, 2), (1, 2)):
        bench.core.control(put_back(f"old {num_tokens}", num_tokens))
        assert bench.core.view().held.num_sequences == num_held
    bench.let_go()
    monkeypatch.setattr(held_file, "MAX_RETAINED", 2)
    for index in range(3):
        bench.core.control(put_back("old", 3, index))
    assert sorted(bench.scheduler.retained.by_id["old"]) == [0, 1]
    bench.let_go()


def test_put_back_does_not_replace_a_retained_sequence() -> None:
    bench = HeldBench()
    held = bench.keep()
    bench.core.control(put_back("a", 7))
    bench.core.control(put_back("a", 7, index=1))
    assert bench.held_of("a") is held and len(bench.held_of("a", 1).tokens) == 7
    assert bench.held_of("a", 1).num_computed == 0
    assert bench.core.view().held == RetainedView(2, 16 + 7)
    bench.let_go()


def test_notes_report_retained_requests_that_changed_or_expired() -> None:
    bench = HeldBench()
    bench.scheduler.subscribe(Topic.HELD)
    [changes] = bench.scheduler.control(put_back("a", 7), 2.0).notes
    assert isinstance(changes, RetainedChanges) and list(changes.found) == [("a", 0)]
    retained, tokens = changes.found["a", 0] or (None, [])
    assert retained is not None and (retained.id, retained.num_tokens, len(tokens)) == ("a", 7, 7)
    assert (retained.num_blocks, retained.expires_in_s) == (0, 50.0)
    for message, now_s, (num_tokens, expires_in_s) in (
        (Rewind("a", 0, 3), 3.0, (3, 49.0)),
        (Hold("a", 9.0), 4.0, (3, 9.0)),
    ):
        [changes] = bench.scheduler.control(message, now_s).notes
        retained, _ = changes.found["a", 0]
        assert (retained.num_tokens, retained.expires_in_s) == (num_tokens, expires_in_s)
    assert bench.scheduler.schedule(12.9).notes == []
    assert bench.scheduler.schedule(13.0).notes == [RetainedChanges({("a", 0): None})]
