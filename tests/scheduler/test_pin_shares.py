"""A tenant's share of the pinned blocks, which its requests bring."""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.base.messages import Unpin
from tests.support.scheduler.pinning_core import PREFIX, Bench


def test_a_tenant_pins_no_more_than_its_share_of_blocks() -> None:
    """The share is a third of half of 60 blocks. Pins of other tenants do not count."""
    bench = Bench(num_blocks=60)
    bench.pin("other", list(range(40)), tenant="b", pin_share=1 / 3)  # 10 blocks
    bench.pin("mine", list(range(36)), tenant="a", pin_share=1 / 3)  # 9
    with pytest.raises(
        RequestError, match=r"your key's pinned KV blocks to 11, .* is 10 of 60. Remove"
    ):
        bench.pin("large", PREFIX[:5], tenant="a", pin_share=1 / 3)
    bench.pin("small", PREFIX[:4], tenant="a", pin_share=1 / 3)
    with pytest.raises(RequestError, match="your key's pinned KV blocks to 11"):
        bench.pin("one more", [49], tenant="a", pin_share=1 / 3)
    bench.core.control(Unpin("mine", "a"))
    bench.pin("again", list(range(30, 50)), tenant="a", pin_share=1 / 3)
    assert list(bench.pins) == ["other", "small", "again"]
    with pytest.raises(RequestError, match="and the limit is half of them"):
        bench.pin("all", 2 * PREFIX + 39 * [7], tenant="operator")


def test_the_number_of_a_tenant_s_pins_is_limited_to_its_share(monkeypatch: Any) -> None:
    """Pins that are still being computed count. A tenant may always have at least one."""
    monkeypatch.setattr("quire.scheduler.reuse.pins.MAX_PINS", 6)
    bench = Bench(num_blocks=60)
    for number in range(3):
        bench.begin_pin(f"a{number}", [number], tenant="a", pin_share=0.5)
    with pytest.raises(RequestError, match="3 prefixes are pinned by your key .* is 3 of 6"):
        bench.begin_pin("a3", [9], tenant="a", pin_share=0.5)
    bench.pin("b", [7], tenant="b", pin_share=0.05)
    with pytest.raises(RequestError, match="1 prefixes are pinned by your key"):
        bench.pin("b2", [8], tenant="b", pin_share=0.05)
    with pytest.raises(RequestError, match=r"above 0 and at most 1, got 0.0"):
        bench.pin("c", [8], tenant="c", pin_share=0.0)
