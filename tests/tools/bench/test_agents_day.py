"""A day of 20 agents on an engine with little memory, compared with a quiet run.

Covers `scheduler/reuse/stores.py` with `tools/bench/agents.py`: blocks move between the device,
host memory and a directory, and subagents fork contexts, while no answer may change.
"""

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.serve.python.async_llm import AsyncLLM
from quire.serve.python.llm import LLM
from quire.tools.bench.agent_sessions import SHAPES, draw_sessions
from quire.tools.bench.agents import Player, Run, contents_of, summary
from quire.tools.bench.metrics import RequestResult

MAX_LEN, KV_BYTES, NUM_TURNS = 512, 3072, 10  # KV_BYTES: of the demo model's token
SETTINGS: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "disable_log_stats": True}
Answers = dict[tuple[int, ...], list[int]]


class EngineSender:
    """Send bodies to an engine instead of a server. answers: tokens by prompt."""

    is_chat = False

    def __init__(self, engine: AsyncLLM) -> None:
        self.common: dict[str, Any] = {}
        self.answers: Answers = {}
        self._engine = engine

    async def send_body(self, body: dict[str, Any], prompt_len: int) -> RequestResult:
        result = RequestResult(0.0, prompt_len, prompt_ids=body["prompt"])
        async for output in self._engine.generate(body["prompt"], params(body["max_tokens"])):
            result.token_ids = list(output.outputs[0].token_ids)
            result.cached_len = output.num_cached_tokens or 0
        self.answers[tuple(body["prompt"])] = result.token_ids
        return result


class Vocabulary:
    """A vocabulary without texts, since prompts are token ids."""

    vocab_size = 1500

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        raise NotImplementedError


def params(num: int) -> SamplingParams:
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True, output_kind=kind)


def crowded(folder: Path, num: int) -> tuple[Run, Answers]:
    """Play all agents concurrently, with a pool of two sessions and host memory of six."""
    shape = dataclasses.replace(SHAPES["agentx"], num_turns=NUM_TURNS)
    sessions = draw_sessions(shape, num, MAX_LEN / 200_000, 0.0, seed=4)
    engine = AsyncLLM(
        "demo", kv_cache_memory_bytes=2 * MAX_LEN * KV_BYTES, kv_disk_dir=str(folder),
        kv_host_gb=6 * MAX_LEN * KV_BYTES / (1 << 30), kv_disk_gb=1, reuse_partial_blocks=True,
        **SETTINGS,
    )  # fmt: skip
    sender = EngineSender(engine)
    player = Player(sender, sessions, contents_of(sessions, Vocabulary(), False), math.inf)  # type: ignore[arg-type]
    try:
        return asyncio.run(player.play()), sender.answers
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_answers_equal_those_of_a_quiet_run(tmp_path: Path) -> None:
    run, answers = crowded(tmp_path, 20)
    assert len(answers) > 200
    with LLM("demo", enable_prefix_caching=False, **(SETTINGS | {"max_num_seqs": 1})) as llm:
        for prompt, answer in answers.items():
            [output] = llm.generate([list(prompt)], params(len(answer)), use_tqdm=False)
            assert list(output.outputs[0].token_ids) == answer
    found = summary(run, Run())
    assert found["failed"] == 0 and found["reuse"] > 0.98
