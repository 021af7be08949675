"""Where the names of a request's blocks begin."""

from tests.scheduler.device import make_request
from tests.scheduler.test_step_results import scheduler_of


def test_a_group_has_a_root_of_its_own_where_nothing_is_cached() -> None:
    request = make_request("r", [1, 2, 3])
    cached, uncached = (scheduler_of(on).memory.names for on in (True, False))
    plain = cached.root(request, 1, 0)
    assert cached.root(request, 3, 0) == cached.root(request, 3, 5) == plain
    roots = {uncached.root(request, 3, arrival) for arrival in range(3)}
    assert len(roots) == 3 and plain not in roots
    assert uncached.root(request, 1, 0) == uncached.root(request, 1, 5)
