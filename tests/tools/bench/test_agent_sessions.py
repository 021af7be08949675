"""Sessions of agents: the published numbers of both shapes, and the traces that are read."""

import json
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.tools.bench.agent_sessions import (
    SHAPES,
    Part,
    Session,
    Turn,
    draw_sessions,
    read_sessions,
    with_other_names,
)


def parts(turn: Turn) -> tuple[Part, ...]:
    assert not isinstance(turn.new, str)
    return turn.new


def num_tokens(turn: Turn) -> int:
    return sum(num for _, num in parts(turn))


def names(sessions: list[Session]) -> set[int]:
    return {name for each in sessions for turn in each.turns for name, _ in parts(turn)}


def numbers(sessions: list[Session]) -> tuple[float, float, float, float]:
    """Return turns per session, input and output tokens per turn, and the repeated share."""
    num_turns = num_input = num_output = num_new = 0
    for session in sessions:
        context = 0
        for turn in session.turns:
            context += num_tokens(turn)
            num_input, num_new = num_input + context, num_new + num_tokens(turn)
            num_output, num_turns = num_output + turn.num_output, num_turns + 1
            context += turn.num_output
    seen = 1 - num_new / num_input
    return num_turns / len(sessions), num_input / num_turns, num_output / num_turns, seen


@pytest.mark.parametrize(
    ("name", "turns", "num_input", "num_output"),
    [("codex", 33, 48_000, 366), ("agentx", 43, 142_000, 444)],
)
def test_sessions_have_the_published_means(
    name: str, turns: int, num_input: int, num_output: int
) -> None:
    sessions = draw_sessions(SHAPES[name], 100, 1.0, 1.0, seed=3)
    roots = [each for each in sessions if each.parent is None]
    found = numbers(roots)
    assert found[:3] == pytest.approx((turns, num_input, num_output), rel=0.06)
    assert 0.94 < found[3] < 0.97
    pauses = [turn.pause_s for each in roots for turn in each.turns[1:]]
    assert np.median(pauses) == pytest.approx(5.2, rel=0.1) and max(pauses) <= 300
    forked = {each.parent for each in sessions if each.parent is not None}
    assert len(forked) == (44 if name == "agentx" else 0)


def test_scale_keeps_the_shape() -> None:
    found = numbers(draw_sessions(SHAPES["codex"], 50, 0.1, 0.0, seed=1))
    assert found[1] == pytest.approx(4_800, rel=0.06) and 0.94 < found[3] < 0.97


def test_subagents_fork_a_turn_that_has_a_next_one() -> None:
    sessions = draw_sessions(SHAPES["agentx"], 60, 0.01, 1.0, seed=2)
    for i, each in enumerate(sessions):
        if each.parent is not None:
            assert each.parent < i and each.after < len(sessions[each.parent].turns) - 1
    assert sessions == draw_sessions(SHAPES["agentx"], 60, 0.01, 1.0, seed=2)
    assert not names(sessions) & names(with_other_names(sessions))


def write(folder: Path, *items: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, items)) + "\n", encoding="utf-8")
    return path


def test_aiperf_sessions_are_read(tmp_path: Path) -> None:
    turns = [{"text": "one"}, {"texts": ["two", "three"], "delay": 1500, "output_length": 7}]
    path = write(tmp_path, {"session_id": "a", "turns": turns}, {"turns": [{"text": "x"}]})
    first, second = read_sessions(path, 512, 20, None)
    assert first.turns == (Turn("one", 20), Turn("two\nthree", 7, 1.5))
    assert second.turns == (Turn("x", 20),)
    assert read_sessions(path, 512, 20, 1) == [first]


def test_mooncake_lines_become_sessions(tmp_path: Path) -> None:
    """Later lines of a session follow the previous answer; other lines are sessions of one turn."""
    lines = [
        {"timestamp": 2000, "session_id": "s", "input_length": 3, "output_length": 1,
         "hash_ids": [5, 6]},
        {"timestamp": 1000, "input_length": 2, "output_length": 4, "hash_ids": [9]},
        {"session_id": "s", "delay": 250, "input_length": 4, "output_length": 2,
         "hash_ids": [5, 6]},
    ]  # fmt: skip
    lone, session = read_sessions(write(tmp_path, *lines), 2, 20, None)
    assert lone == Session((Turn(((9, 2),), 4, is_whole=True),), 0.0)
    assert session.at_s == 1.0
    assert session.turns == (
        Turn(((5, 2), (6, 1)), 1, is_whole=True),
        Turn(((5, 2), (6, 2)), 2, 0.25, is_whole=True),
    )


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"turns": []}, "line 1: `turns` must be a list of objects"),
        ({"turns": [{"role": "user"}]}, "line 1: each turn needs a `text`"),
        ({"turns": [{"text": "a", "image": "b"}]}, "turns with image are not supported"),
        ({"turns": [{"text": "a", "delay": -1}]}, "delay must be a number from 0, got -1"),
        ({"turns": [{"text": "a", "output_length": "9"}]}, "output_length must be a number from 1"),
    ],
)
def test_invalid_aiperf_lines_are_refused(tmp_path: Path, item: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_sessions(write(tmp_path, item), 512, 20, None)


def test_trace_without_sessions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,374,44\n")
    with pytest.raises(ConfigError, match="Azure's trace, which has no sessions"):
        read_sessions(path, 512, 20, None)
