"""The accuracy benchmark: its statistics by hand, its held-out material, and a small run."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import accuracy
from benchmarks.models.accuracy_items import answer_mask, held_out_tasks, held_out_texts
from benchmarks.models.accuracy_statistics import LogitError, PairedAccuracy, mean_and_error
from benchmarks.result_files import read
from demo_model import chat
from demo_model.item import held_out
from quire.models.source import resolve_model
from quire.ops.native import core
from quire.render.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model("demo").directory)


def log_softmax(logits: list[list[float]]) -> np.ndarray:
    exact = np.array(logits)
    logprobs: np.ndarray = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    return logprobs.astype(np.float32)


def pairs(both: int, lost: int, gained: int, neither: int) -> PairedAccuracy:
    before = [True] * (both + lost) + [False] * (gained + neither)
    after = [True] * both + [False] * lost + [True] * gained + [False] * neither
    keys = [str(index) for index in range(len(before))]
    return PairedAccuracy.of(np.array(before), np.array(after), keys)


def test_pairs_are_counted_and_tested() -> None:
    found = pairs(90, 6, 2, 2)
    assert (found.num_right, found.lost, found.gained, found.num_items) == (92, 6, 2, 100)
    assert found.points == pytest.approx(-4.0)
    assert found.p_value == pytest.approx(2 * (1 + 8 + 28) / 2**8)
    low, high = found.interval
    assert low < -4 < high
    assert (high - low) / 2 == pytest.approx(
        100 * 1.959964 * math.sqrt((9 / 102 - (4 / 102) ** 2) / 102), rel=1e-6
    )


def test_equal_answers_leave_a_chance_of_a_difference() -> None:
    found = pairs(2000, 0, 0, 0)
    low, high = found.interval
    assert found.points == 0 and found.p_value == 1
    assert low == -high and 0 < high < 0.15


def test_items_that_ask_the_same_count_once() -> None:
    before = np.ones(1000, bool)
    after = np.arange(1000) >= 40
    intervals = []
    for size in (1, 20):
        keys = [str(index // size) for index in range(1000)]
        low, high = PairedAccuracy.of(before, after, keys).interval
        intervals.append(high - low)
    assert intervals[1] / intervals[0] == pytest.approx(math.sqrt(20), rel=0.05)


def test_different_numbers_of_items_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="3 and 2 items"):
        PairedAccuracy.of(np.ones(3, bool), np.ones(2, bool), ["a", "b"])


def test_the_error_of_a_mean_counts_texts_not_tokens() -> None:
    rng = np.random.default_rng(0)
    texts = [np.full(50, value) for value in rng.normal(size=40)]
    mean, error = mean_and_error(texts)
    values = np.array([text[0] for text in texts])
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / math.sqrt(40))


def test_a_mean_is_over_tokens() -> None:
    assert mean_and_error([np.zeros(3), np.ones(1)])[0] == pytest.approx(0.25)


def test_logit_errors_by_hand() -> None:
    error = LogitError()
    before = [[math.log(2), 0.0], [0.0, 1.0]]
    error.add(log_softmax(before), log_softmax([[0.0, 0.0], [3.0, 4.0]]))
    found = error.figures()
    assert found["mean_absolute"] == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert found["largest_absolute"] == pytest.approx(math.log(2) / 2, abs=1e-6)
    norms = math.log(2) ** 2 / 2, math.log(2) ** 2 / 2 + 1 / 2
    assert found["relative"] == pytest.approx(math.sqrt(norms[0] / norms[1]), abs=1e-6)
    divergence = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert found["largest_divergence"] == pytest.approx(divergence, abs=1e-6)
    assert found["divergence"] == pytest.approx(divergence / 2, abs=1e-6)
    assert found["same_best_token"] == 1.0
    error.add(log_softmax([[0.0, 1.0]]), log_softmax([[1.0, 0.0]]))
    assert error.figures()["same_best_token"] == pytest.approx(2 / 3)


def test_the_assistants_words_are_marked() -> None:
    start, speaker, end = 1, 9, 2
    token_ids = [1, 8, 5, 30, 31, 2, 5, 1, 9, 5, 40, 41, 2, 5, 1, 8, 5, 9, 2, 5]
    mask = answer_mask(token_ids, start, speaker, end)
    assert np.flatnonzero(mask).tolist() == [10, 11, 12]


def test_texts_are_marked_where_their_answers_are(tokenizer: Tokenizer) -> None:
    texts = held_out_texts(2000, tokenizer)
    assert sum(len(text.token_ids) for text in texts) >= 2000
    for text in texts:
        written = tokenizer.decode(text.token_ids)
        turns = written.split(f"{chat.START}assistant\n")[1:]
        answers = [turn.split(chat.END)[0] + chat.END for turn in turns]
        marked = [
            i for i, is_answer in zip(text.token_ids, text.is_answer, strict=True) if is_answer
        ]
        assert tokenizer.decode(marked) == "".join(answers)


@pytest.mark.parametrize("kind", ["stories", "addition", "tools"])
def test_tasks_are_held_out_and_know_right_answers(kind: str, tokenizer: Tokenizer) -> None:
    tasks = held_out_tasks(kind, 20, tokenizer)
    assert len({task.prompt for task in tasks}) == 20
    for task in tasks:
        wanted = chat.content_of(task.item.answer)
        assert held_out(task.item.key)
        assert task.is_right(wanted) and not task.is_right("")
        assert task.max_tokens > len(tokenizer.encode(wanted))


def test_every_format_is_compared_with_one_that_runs() -> None:
    formats = accuracy.UNQUANTISED + accuracy.QUANTISED + accuracy.MORE
    names = [format.name for format in formats]
    assert len(set(names)) == len(names)
    unquantised = {format.name for format in accuracy.UNQUANTISED}
    for format in formats:
        assert set(format.bases) <= unquantised - {format.name}
        assert format.bases or format.name == "float32"


@pytest.mark.parametrize(
    ("lost", "items", "said"),
    [
        (0, 2000, "shown over all items"),
        (0, 300, "shown over all items; open for copying, json"),
        (1, 100, "open over all items; open for copying, json"),
        (4, 100, "false over all items; open for copying, json"),
        (40, 2000, "false over all items; false for copying, json"),
    ],
)
def test_verdicts(lost: int, items: int, said: str) -> None:
    base, measured = (accuracy.Measured(accuracy.QUANTISED[0]) for _ in range(2))
    for kind in ("copying", "json"):
        base.right[kind] = np.ones(items, bool)
        measured.right[kind] = np.arange(items) >= lost
    result = {"format": "int8", "against": "bfloat16"}
    keys = {kind: [str(index) for index in range(items)] for kind in base.right}
    tasks = accuracy.task_figures(measured, base, keys)
    assert accuracy.verdict({**result, "tasks": tasks}).endswith(f"0.5 lost: {said}.")


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accuracy.json"
    arguments = "--items 3 --kinds addition --formats int8 --text-tokens 400 --positions 60"
    monkeypatch.setattr(sys, "argv", ["accuracy", *arguments.split(), "--output-json", str(path)])
    accuracy.main()
    rows = read(path).rows
    compared = [(row["format"], row["against"]) for row in rows]
    assert compared == [
        ("float32", "float32"), ("bfloat16", "float32"), ("int8", "bfloat16"), ("int8", "float32")
    ]  # fmt: skip
    errors = [row["logits.relative"] for row in rows]
    assert errors[0] == 0 < errors[1] < errors[3] < 0.1
    for row in rows:
        assert row["logits.positions"] >= 60
        assert abs(row["text.all.difference"]) < 0.05
        assert row["tasks.all.items"] == 3
    assert "int8 against bfloat16: " in capsys.readouterr().out
