"""Published traces: columns, times, and shared prefixes."""

import json
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.tools.simulate.workload import Traced
from quire.tools.traces import Trace, read_trace
from quire.tools.workloads import token_ids_of


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def lengths(trace: Trace) -> list[tuple[float, int, int]]:
    return [(each.at_s, each.num_prompt, each.num_output) for each in trace.requests]


def test_azure_traces_of_2023_and_2024_are_read(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    older = "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.4799600,2,109\n"
    newer = "2024-05-10 00:00:01.500000+00:00,374,44\n2024-05-10 00:00:00+00:00,2,109\n"
    trace = read_trace(write(tmp_path, head + older))
    assert trace.format == "Azure"
    assert lengths(trace) == [(0.0, 374, 44), (pytest.approx(1.5), 2, 109)]
    assert lengths(read_trace(write(tmp_path, head + newer))) == [(0.0, 2, 109), (1.5, 374, 44)]


def test_burst_gpt_skips_failed_answers(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,0,1087,API log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    trace = read_trace(write(tmp_path, text))
    assert lengths(trace) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert trace.num_skipped == 1
    assert len(read_trace(write(tmp_path, text), max_requests=1).requests) == 1


def mooncake(*items: dict[str, object]) -> str:
    return "\n".join(map(json.dumps, items)) + "\n"


def test_mooncake_hash_ids_become_shared_tokens(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mooncake(
            {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
            {"timestamp": 3000, "input_length": 1300, "output_length": 6, "hash_ids": [7, 8, 11]},
            {"timestamp": 1000, "input_length": 900, "output_length": 2, "hash_ids": [12]},
        ),
    )
    trace = read_trace(path)
    assert lengths(trace) == [(0.0, 1100, 5), (1.0, 900, 2), (3.0, 1300, 6)]
    first, other, same = (token_ids_of(each.prompt, 1000) for each in trace.requests)
    assert first[:1024] == same[:1024] and first[1024:] != same[1024:1100]
    assert first[:512] != other[:512] and len(set(first[:512])) > 300
    assert min(first) >= 3 and max(first) < 1000
    arrivals = list(Traced(trace, 1000, rate_per_s=0.5).arrivals())
    assert [arrival.at_s for arrival in arrivals] == [0.0, 2.0, 6.0]


def test_turn_arrives_after_the_previous_answer(tmp_path: Path) -> None:
    def turn(num: int, **fields: object) -> dict[str, object]:
        return {"input_length": num, "output_length": 3, "session_id": "a", **fields}

    other = {"timestamp": 500, "input_length": 9, "output_length": 1}
    text = mooncake(turn(10, timestamp=2000), other, turn(20, delay=250))
    work = Traced(read_trace(write(tmp_path, text)), 100)
    assert [(each.at_s, each.num_output) for each in work.arrivals()] == [(0.0, 1), (1.5, 3)]
    assert work.then("1", 4.0) is None
    late = work.then("0", 4.0)
    assert late is not None
    assert (late.at_s, len(late.request.prompt_token_ids)) == (4.25, 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when,what\n1,2\n", "TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "line 2: TIMESTAMP='soon'"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1}\n', "line 1: input_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "must be above 0"),
        ("{not json\n", "line 1, is not valid JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("", "not a known trace"),
    ],
)
def test_invalid_traces_are_reported(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, text))


def test_missing_trace_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
