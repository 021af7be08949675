"""How often a process is started again, and after which pauses."""

from quire.serve.children import MAX_RESTARTS, RESTART_WINDOW_S, Restarts


def test_pauses_grow_until_it_is_given_up() -> None:
    restarts, pauses = Restarts(), []
    while (pause_s := restarts.pause_s(float(len(pauses)))) is not None:
        pauses.append(pause_s)
    assert pauses == [0.0, 1.0, 2.0] and len(pauses) == MAX_RESTARTS


def test_deaths_of_long_ago_do_not_count() -> None:
    restarts = Restarts()
    for i in range(20):
        assert restarts.pause_s(i * RESTART_WINDOW_S / MAX_RESTARTS) is not None
    assert restarts.pause_s(20 * RESTART_WINDOW_S) == 0.0
