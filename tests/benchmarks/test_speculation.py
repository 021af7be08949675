"""The benchmark of draft tokens: a small run, its verdicts, and replays of other models' drafts."""

import argparse
import itertools
import random
from collections.abc import Iterator
from statistics import NormalDist, median

import pytest

from benchmarks.models import speculation
from benchmarks.models.drafts.engines import MeasuredEngine
from benchmarks.models.drafts.record import REPLAYED, Record, Replayed, drafter_of, record_of
from benchmarks.models.drafts.replay import Replay
from benchmarks.models.drafts.workloads import DraftRequest
from benchmarks.models.speculation import MIN_PAIRS, WORKLOADS, interval, measure_demo, verdict
from quire import SamplingParams
from quire.engine.drafting.draft_pace import StepTimes
from quire.render.renderer import RenderedPrompt

RIGHT = [10, 11, 12, 13, 14, 15]


@pytest.fixture(autouse=True)
def nothing_replayed() -> Iterator[None]:
    yield
    REPLAYED.clear()


@pytest.mark.slow
def test_small_run_covers_all_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark itself compares answers. Without step times, all drafts are verified."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(speculation, "ORDERS", (True,))
    options = argparse.Namespace(
        rows=[2], workloads=list(WORKLOADS), minutes=0.0, dtype="float32", kv_mib=32,
        method="suffix", speculative_config=None,
    )  # fmt: skip
    rows = {cell.workload: cell.figures() for cell in measure_demo(options)}
    assert list(rows) == list(WORKLOADS)
    assert all(row["pairs"] == 1 and row["verdict"] == "too few pairs" for row in rows.values())
    assert rows["tools"]["accepted"] > 10 and rows["json"]["accepted"] > 20
    assert rows["json"]["tokens_per_step"] > 1.5 * rows["random"]["tokens_per_step"]


def test_interval_covers_the_median_in_95_of_100_cases() -> None:
    choose, num_covered = random.Random(1), 0
    for _ in range(2000):
        low, high = interval([choose.lognormvariate(0.0, 0.3) for _ in range(12)])
        num_covered += low <= 1.0 <= high
    assert 0.95 <= num_covered / 2000 <= 0.99


def test_verdict_needs_enough_pairs() -> None:
    assert interval([1.0, 3.0, 2.0]) == (1.0, 3.0)
    assert verdict(MIN_PAIRS - 1, 0.5) == "too few pairs"
    assert interval([0.9, 0.91, 0.92, 0.93, 0.94, 0.95]) == (0.9, 0.95)
    assert verdict(MIN_PAIRS, 0.95) == "slower"
    assert verdict(MIN_PAIRS, 0.991) == "not slower"
    many = [NormalDist(1.0, 0.1).inv_cdf((i + 0.5) / 101) for i in range(101)]
    low, high = interval(many)
    assert 0.96 < low < median(many) < high < 1.04


def test_cells_share_the_time_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.repeat(100.0)
    monkeypatch.setattr(speculation.time, "perf_counter", lambda: next(ticks))
    cells = [speculation.Cell("json", rows) for rows in (1, 64, 256)]
    ends = [end_s for _, end_s in speculation.shares(cells, 60.0)]
    assert ends[-1] == pytest.approx(160.0)
    assert ends[1] - ends[0] == pytest.approx(2 * (ends[0] - 100.0), rel=0.02)


def test_record_holds_proposed_and_accepted_counts() -> None:
    record = Record.of([*RIGHT, 16], {0: RIGHT[:3], 3: [13, 99, 98], 6: [1, 2]})
    assert record.places == [(3, 3), (2, 2), (1, 1), (3, 1), (2, 0), (0, 0), (1, 0)]


def looked_up(tokens: list[int], num: int) -> list[int]:
    """Return what followed the newest earlier match of the last two tokens."""
    for end in range(len(tokens) - 1, 1, -1):
        if tokens[end - 2 : end] == tokens[-2:]:
            return list(itertools.islice(itertools.cycle(tokens[end:]), num))
    return []


def test_record_holds_the_proposals_of_all_steps() -> None:
    """This includes steps in which drafting would pause. A plain search of the earlier text gives
    the expected proposals."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=80, ignore_eos=True)
    prompt = RenderedPrompt(list(range(20, 30)))
    config = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    engine = MeasuredEngine.build(
        config, model="demo", max_model_len=128, max_num_seqs=1, kv_cache_memory_bytes=8 << 20
    )
    [record] = record_of(engine, [DraftRequest(prompt, params)])
    [answer] = engine.run([DraftRequest(prompt, params)]).answers
    drafter = drafter_of(engine)
    assert not set(vars(drafter)) & {"proposals", "observe", "_decide_rests", "_rest"}
    engine.close()
    proposed, at = dict[int, list[int]](), 1
    while at < len(answer):
        num = min(4, len(answer) - at - 1)
        proposed[at] = looked_up(prompt.token_ids + answer[:at], num)
        pairs = zip(proposed[at], answer[at:], strict=False)
        at += 1 + len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert record == Record.of(answer, proposed)
    num_found = sum(map(bool, proposed.values()))
    assert 10 < num_found < 60, "there are misses and later matches"


def test_replay_proposes_according_to_the_record() -> None:
    """Accepted tokens equal the answer's, and rejected ones differ. The record repeats."""
    answer = list(range(50, 60))
    REPLAYED[7] = Replayed(2, answer, Record([(3, 2), (0, 0), (4, 4)]), vocab_size=60)
    replay = Replay()
    replay.extend([7, 8])
    assert replay.propose(8) == [50, 51, 53]
    assert replay.propose(1) == [50]
    replay.extend([50])
    assert replay.propose(8) == []
    replay.extend([51])
    assert replay.propose(8) == answer[2:6]
    replay.extend([52, 53])
    assert replay.propose(8) == []
    other = Replay()
    other.extend([9, 8])
    assert other.propose(4) == []
