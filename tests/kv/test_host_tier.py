"""When what a step copied out to host memory may be relied on."""

from quire.base.cache_group import CacheGroup
from quire.kv.manager import KVManager

FULL = CacheGroup("full", (0,), 1, 8)


def test_what_a_step_copied_out_is_there_with_its_result() -> None:
    kv = KVManager((FULL,), (4,), 4, host_limits=[4])
    tier = kv.tier
    assert tier is not None
    for step_id, name in ((3, b"x"), (5, b"y")):
        tier._fresh = [(0, name)]
        tier.end_plan(step_id)
    settled = [tier.settle(step_id) for step_id in range(2, 7)]
    assert settled == [[], [(0, b"x")], [], [(0, b"y")], []]
