"""What stores are asked for and told to keep, to the block: not the last one of a prompt, nothing
that is there, and no more at once than may be."""

import pytest

from quire.base.kv_orders import Keep, Kept, LookUp
from quire.scheduler.stores import KEEP_OLD, Stores
from tests.scheduler.test_stores import PROMPT, Lab, all_names


def stores_of(lab: Lab) -> Stores:
    assert lab.scheduler.stores is not None
    return lab.scheduler.stores


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(16, 3), (17, 4), (20, 4)])
def test_all_blocks_but_the_one_of_the_last_token_are_looked_up(
    num_tokens: int, num_blocks: int
) -> None:
    lab = Lab()
    lab.add(PROMPT[:num_tokens])
    [order] = lab.orders()
    assert isinstance(order, LookUp) and len(order.names) == num_blocks


def test_what_is_there_is_not_looked_up() -> None:
    lab = Lab()
    lab.generate(PROMPT)
    lab.answer()
    lab.orders()
    lab.add(PROMPT)
    assert not lab.orders() and not stores_of(lab).waiting
    lab.add([*PROMPT, *range(22, 30)], name="longer")
    [order] = lab.orders()
    assert len(all_names([order])) == 1


def test_only_so_many_blocks_are_on_their_way_to_a_store() -> None:
    lab = Lab()
    stores, pool = stores_of(lab), lab.kv.host_pools[0]
    names = [(0, b"%d" % i) for i in range(5)]
    for _, name in names:
        pool.index(pool.allocate(), name)
    stores.keep(names, most=3)
    stores.keep(names[3:], most=3)
    [order] = lab.orders()
    assert isinstance(order, Keep) and [item[:2] for item in order.items] == names[:3]
    stores.keep(names[3:], most=4)
    [another] = lab.orders()
    assert [item[:2] for item in another.items] == names[3:4]
    stores.take(Kept(0, order.ticket, [True] * 3, 99, 0.1))
    stores.keep(names[3:], most=3)
    assert [len(each.items) for each in lab.orders()] == [2]
    assert stores.num_kept == 3


def test_a_store_s_speed_is_a_mean_that_forgets() -> None:
    stores = stores_of(Lab())
    stores._measure(0, 100.0)
    assert stores._bytes_per_s[0] == pytest.approx(100.0)
    stores._measure(0, 200.0)
    assert stores._bytes_per_s[0] == pytest.approx(KEEP_OLD * 100 + (1 - KEEP_OLD) * 200)
    for _ in range(100):
        stores._measure(0, 200.0)
    assert stores._bytes_per_s[0] == pytest.approx(200.0, rel=1e-3)
