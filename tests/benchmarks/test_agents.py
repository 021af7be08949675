"""The comparison of servers under sessions of agents: texts, figures, and a run with quire.

Covers `benchmarks/server/agents.py`.
"""

import asyncio
from dataclasses import replace

from benchmarks.server import agents
from benchmarks.server.agents import (
    CELLS,
    Served,
    Turn,
    llama_command,
    num_computed,
    texts_of,
    vllm_command,
)
from quire.tools.http_client import HttpClient

LOG = b"""
llama_perf_context_print: prompt eval time =     123.45 ms /    57 tokens (    2.17 ms per token)
llama_perf_context_print:        eval time =      99.00 ms /    15 runs
llama_perf_context_print: prompt eval time =       0.45 ms /     1 tokens
"""


def test_sessions_share_only_the_system_prompt() -> None:
    cell = replace(CELLS[0], num_sessions=3, num_turns=4, system=10, first=7, turn=5)
    source = "".join(chr(1000 + i) for i in range(100))
    sessions = texts_of(cell, source)
    assert [[len(text) for text in texts] for texts in sessions] == [[17, 5, 5, 5]] * 3
    assert {texts[0][:10] for texts in sessions} == {source[:10]}
    own = [texts[0][10:] + "".join(texts[1:]) for texts in sessions]
    assert "".join(own) == source[10:76], "sessions share no other text"


def test_prompt_tokens_are_read_from_the_log() -> None:
    assert num_computed(LOG) == 58
    assert num_computed(b"nothing of that") is None


def test_computed_tokens_are_prompt_tokens_minus_cached_ones() -> None:
    served = Served([Turn(0.1, 1.0, 100, 0), Turn(0.3, 2.0, 150, 110)], 3.0)
    row = served.row()
    assert (row["computed_tokens"], row["num_turns"], row["turn_s"]) == (140, 2, 1.5)
    assert row["first_token_ms"]["most"] == 300.0
    served.turns[0].num_prompt = None
    assert served.num_computed is None
    served.num_logged = 7
    assert served.num_computed == 7


def test_llama_cpp_has_one_context_and_a_cache() -> None:
    command = llama_command("python", agents.DEMO, CELLS[1], 1234)
    assert command[command.index("--n_ctx") + 1] == "2048"
    assert command[command.index("--cache") + 1] == "true"


def test_vllm_gets_its_variables_and_equal_limits() -> None:
    command = vllm_command("/venv/bin/python", agents.DEMO, CELLS[0], 1234)
    assert command[0] == "env" and "VLLM_CPU_KVCACHE_SPACE=1" in command
    assert any("/venv/lib/libiomp5.so" in part for part in command)
    assert command[command.index("--max-num-seqs") + 1] == "2"


def test_turn_resends_the_previous_answer() -> None:
    prompts: list[str] = []

    class Client(HttpClient):
        async def stream_json(self, path, body):  # type: ignore[no-untyped-def, override]
            prompts.append(agents.json.loads(body)["prompt"])
            yield '{"choices": [{"text": "an"}]}'
            yield '{"choices": [{"text": "swer"}], "usage": {"prompt_tokens": 9}}'
            yield "[DONE]"

    player = agents.Player(Client("http://127.0.0.1:1"), CELLS[1], {})
    served = asyncio.run(player.play([["one ", " two "]]))
    assert prompts == ["one ", "one answer two "]
    assert len(served.turns) == 2 and served.num_computed == 18
