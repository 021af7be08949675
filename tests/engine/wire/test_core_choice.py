"""The choice of a core for a request is pure, so it is tested by examples and by random inputs."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.requests.media_items import MediaItem
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.observability.heartbeat import Heartbeat, HeartbeatReader, LoadReport
from quire.engine.wire.core_choice import (
    EVERY_BLOCK,
    MUCH_MORE,
    CoreChoice,
    OpenLoad,
    SeenLoad,
    _marked_blocks,
    check_core,
    weight,
)

BLOCK_SIZE = 4  # tokens
PICTURE = MediaItem(start=1, num_tokens=2, digest=b"p" * 32)
IDLE = {0: 0, 1: 0}


def request(token_ids: list[int], name: str = "a", n: int = 1, **more: object) -> Request:
    return Request(name, token_ids, SamplingParams(n=n), 0, **more)  # type: ignore[arg-type]


def prompt(number: int, num_tokens: int = 400) -> list[int]:
    return [number * 1000 + i for i in range(num_tokens)]


def test_conversation_stays_on_its_core() -> None:
    choice = CoreChoice(2, BLOCK_SIZE)
    choice.choose(request(prompt(1)), IDLE)
    assert choice.choose(request(prompt(2)), {0: 700, 1: 0}) == 1
    for turn in range(1, 5):
        assert choice.choose(request(prompt(2) + prompt(7, 40 * turn)), IDLE) == 1


def test_unrelated_prompts_spread_evenly() -> None:
    choice, loads = CoreChoice(3, BLOCK_SIZE), [OpenLoad() for _ in range(3)]
    for number in range(30):
        one = request(prompt(number), str(number))
        core = choice.choose(one, {core: load.total for core, load in enumerate(loads)})
        loads[core].add(one)
    assert {load.total for load in loads} == {10 * weight(one)}


def test_prompt_moves_off_an_overloaded_core_and_is_known_on_both() -> None:
    choice = CoreChoice(2, BLOCK_SIZE)
    assert choice.choose(request(prompt(1)), IDLE) == 0
    assert choice.choose(request(prompt(1)), {0: 600, 1: 0}) == 0  # core 0 has 400 tokens cached
    assert choice.choose(request(prompt(1)), {0: 900, 1: 0}) == 1
    assert (
        choice.choose(request(prompt(1)), {0: 900, 1: 899}) == 1
    )  # cached on both: the least loaded
    assert choice.choose(request(prompt(1)), {0: 899, 1: 900}) == 0


def test_prefix_common_to_all_does_not_overload_one_core() -> None:
    choice, loads, where = CoreChoice(2, BLOCK_SIZE), [OpenLoad(), OpenLoad()], Counter[int]()
    for number in range(40):
        one = request(prompt(0, 40) + prompt(number + 1, 60), str(number))
        core = choice.choose(one, {core: load.total for core, load in enumerate(loads)})
        loads[core].add(one)
        where[core] += 1
    assert abs(where[0] - where[1]) <= 2


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"adapter_id": "x"}, {"media": (PICTURE,)}])
def test_prompts_differ_by_salt_adapter_and_media(other: dict[str, object]) -> None:
    choice = CoreChoice(2, BLOCK_SIZE)
    choice.choose(request(prompt(1)), {1: 0})
    assert choice.choose(request(prompt(1), tenant="other"), IDLE) == 1
    assert choice.choose(request(prompt(1), **other), {0: 0, 1: 399}) == 0
    assert choice.choose(request(prompt(1)), {0: 0, 1: 399}) == 1
    assert choice.choose(request(prompt(1)[:3]), {0: 0, 1: 1}) == 0  # shorter than one block


@pytest.mark.parametrize(("start", "core"), [(200, 0), (399, 1)])
def test_image_changes_a_prompt_only_from_its_start_on(start: int, core: int) -> None:
    """A busy core that has 200 of the tokens cached is not chosen; one that has almost all of them
    is."""
    choice, picture = CoreChoice(2, BLOCK_SIZE), MediaItem(start, 1, digest=b"p" * 32)
    one = request(prompt(1))
    choice.choose(request(prompt(1), media=(picture,)), {1: 0})
    load = weight(one) // 2 + 300
    assert choice.choose(one, {0: 0, 1: load}) == core


def test_idle_cores_take_turns() -> None:
    choice = CoreChoice(3, BLOCK_SIZE)
    idle = dict.fromkeys(range(3), 0)
    assert [choice.choose(request(prompt(n)), idle) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_restarted_core_has_no_cached_prompts() -> None:
    choice = CoreChoice(2, BLOCK_SIZE)
    choice.sent(request(prompt(1)), (0, 1))
    choice.forget(0)
    assert choice.choose(request(prompt(1)), IDLE) == 1
    choice.forget_all()
    assert choice.choose(request(prompt(1)), {0: 0, 1: 1}) == 0


def test_least_loaded_core_is_chosen_without_a_prefix_cache() -> None:
    choice = CoreChoice(2, 0)
    choice.choose(request(prompt(1)), {1: 0})
    assert choice.choose(request(prompt(1)), IDLE) == 0


def test_first_blocks_of_prompts_are_remembered_longest() -> None:
    choice = CoreChoice(2, BLOCK_SIZE, max_marks=50)
    choice.choose(request(prompt(1)), {1: 0})
    assert len(choice) == 50
    assert choice.choose(request(prompt(1, 40)), IDLE) == 1
    choice.choose(request(prompt(2)), {0: 0})
    assert choice.choose(request(prompt(1, 40)), {0: 0, 1: 1}) == 0


def test_long_prompts_are_marked_at_few_fixed_blocks() -> None:
    longest = list(_marked_blocks(8192))
    assert longest[:EVERY_BLOCK] == list(range(1, EVERY_BLOCK + 1))
    assert len(longest) == 288 and longest[-1] == 8192
    for num in (0, 1, 63, 64, 65, 66, 1000):
        assert list(_marked_blocks(num)) == [at for at in longest if at <= num]


def test_unknown_core_error_names_the_number_of_cores() -> None:
    check_core(None, 2)
    check_core(1, 2)
    with pytest.raises(RequestError, match=r"data_parallel_rank=2: there are 2 cores, 0 to 1") as e:
        check_core(2, 2)
    assert e.value.field == "data_parallel_rank"
    with pytest.raises(RequestError, match="there is one engine, 0"):
        check_core(-1, 1)


def test_load_counts_each_request_once() -> None:
    load, one = OpenLoad(), request(prompt(1), n=3)
    load.add(one)
    load.add(one)
    assert load.total == weight(one) == 400 + 3 * 256
    load.remove("a")
    load.remove("a")
    assert load.total == 0


TURNS = st.tuples(
    st.lists(st.integers(0, 2), max_size=40),
    st.dictionaries(st.integers(0, 3), st.integers(0, 5000), min_size=1),
)


@given(st.lists(TURNS, max_size=30))
def test_request_never_goes_to_a_much_busier_core(
    turns: list[tuple[list[int], dict[int, int]]],
) -> None:
    choice = CoreChoice(4, BLOCK_SIZE, max_marks=20)
    for token_ids, loads in turns:
        one = request(token_ids)
        core = choice.choose(one, loads)
        assert core in loads and len(choice) <= 20
        max_cached = len(token_ids)
        costs = [load + weight(one) for load in loads.values()]
        assert loads[core] + weight(one) - max_cached <= MUCH_MORE * min(costs)


def test_own_requests_count_before_the_core_reports_them() -> None:
    seen = SeenLoad()
    assert seen.tokens(LoadReport(), own=300) == 300
    assert seen.tokens(LoadReport(500, 1), own=300) == 500  # 200 of other clients
    assert seen.tokens(LoadReport(500, 1), own=400) == 600
    assert seen.tokens(LoadReport(500, 1), own=100) == 300
    assert seen.tokens(LoadReport(50, 2), own=100) == 100


def test_unchanged_load_in_a_new_report_counts(tmp_path: Path) -> None:
    """Another client's request may have the same weight as our request that has ended."""
    beat, reader = Heartbeat(tmp_path / "beat", 1.0), HeartbeatReader(tmp_path / "beat")
    seen = SeenLoad()
    beat.report_load(300)
    assert seen.tokens(reader.load(), own=300) == 300
    beat.report_load(0)  # our request has ended
    beat.report_load(300)  # another client's request has started
    assert seen.tokens(reader.load(), own=0) == 300
