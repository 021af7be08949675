"""Items of prompts in names of blocks, and what forks and rewinds leave of them."""

import msgspec
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Fork, Request, Rewind
from quire.base.requests.media_items import MediaItem
from quire.base.requests.retention import check_fork
from quire.kv.digest import extend_digests
from tests.scheduler.media.test_media_inputs import scheduler_of
from tests.scheduler.test_held import HeldBench
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import step


@pytest.mark.parametrize("start", [1, 4, 6])
def test_marks_are_in_the_names_of_rows_that_are_named_together(start: int) -> None:
    scheduler = scheduler_of()
    item = MediaItem(start, 1, b"p" * 32)
    for name, media in (("plain", ()), ("marked", (item,))):
        request = make_request(name, list(range(7)), max_tokens=4)
        scheduler.add(msgspec.structs.replace(request, media=media), 0.0)
    step(scheduler)
    step(scheduler)  # fills the second block of each
    found = scheduler.lifecycle.sequences
    for sequence, marks in ((found["plain"], []), (found["marked"], [(start, b"p" * 32)])):
        expected: list[bytes] = []
        extend_digests(expected, sequence.root, sequence.known_tokens, 4, 2, marks=marks)
        assert sequence.digests == expected
    names = scheduler.memory.names
    assert names.of_prefix(found["plain"], 5) != names.of_prefix(found["marked"], 5) or start > 4


def picture(start: int, num_tokens: int) -> MediaItem:
    return MediaItem(start, num_tokens, bytes([start]) * 32)


def test_a_fork_inherits_the_items_of_the_tokens_that_it_shares() -> None:
    bench = HeldBench()
    held = bench.keep()
    items = picture(1, 3), picture(6, 2)
    held.request = msgspec.structs.replace(held.request, media=items)
    find = bench.scheduler.retained.complete
    new = picture(9, 1)

    def fork(at: int, *media: MediaItem) -> Request:
        request = make_request("b", held.tokens[:10].tolist())
        return msgspec.structs.replace(request, fork=Fork("a", 0, at), media=media)

    assert find(fork(8, new)).media == (*items, new)
    assert find(fork(5)).media == items[:1]
    assert find(fork(6)).media == items[:1] and find(fork(1)).media == ()
    for at in (2, 3, 7):
        with pytest.raises(RequestError, match=f"token {at} is inside the image at tokens"):
            find(fork(at))
    unknown = msgspec.structs.replace(fork(8, new), fork=Fork("nobody", 0, 8))
    assert find(unknown).media == (new,)


def test_a_fork_is_refused_without_the_items_that_it_needs() -> None:
    """Computed as text, placeholder tokens would mean nothing."""
    bench = HeldBench()
    held = bench.keep()
    held.request = msgspec.structs.replace(held.request, media=(picture(1, 3), picture(6, 2)))
    sources = bench.scheduler.held(0.0, "a")
    plain = make_request("b", held.tokens[:10].tolist())
    fork = msgspec.structs.replace(plain, fork=Fork("a", 0, 8, num_items=2))
    assert check_fork(fork, sources) == 8
    without = [msgspec.structs.replace(sources[0], media=())]
    for left in ([], without):
        with pytest.raises(RequestError, match="no longer has the 2 images and videos among"):
            check_fork(fork, left)
    text = msgspec.structs.replace(plain, fork=Fork("a", 0, 5))
    assert check_fork(text, []) == 0


def test_a_rewind_drops_the_items_after_it_and_cuts_none() -> None:
    bench = HeldBench()
    held = bench.keep()
    items = picture(1, 3), picture(6, 2)
    held.request = msgspec.structs.replace(held.request, media=items)
    bench.core.control(Rewind("a", 0, 7))
    assert len(held.tokens) == 16 and held.request.media == items, "token 7 is inside an item"
    bench.core.control(Rewind("a", 0, 6))
    assert len(held.tokens) == 6 and held.request.media == items[:1]
    [retained] = bench.scheduler.held(0.0)
    assert retained.media == items[:1]
