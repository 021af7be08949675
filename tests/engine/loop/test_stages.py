"""A model in stages gives the tokens of the whole model, whatever the engine does at the same time.

Covers `runner/stage.py`.
"""

from functools import cache
from itertools import cycle
from typing import Any

import pytest

from quire.base.messages import Draft, Drafted
from tests.engine.loop.test_beams import Searches
from tests.engine.loop.test_groups import OTHERS, PROMPT, Groups
from tests.support.cases import in_turn, slow_but
from tests.support.engine.failing_core import Bench, prompt, with_poison
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

LONG = prompt(3, 30)


class StagedGroups(Groups):
    num_stages = 2


class StagedSearches(Searches):
    num_stages = 2


def samples(kind: type[Groups], architecture: str, **settings: Any) -> Groups:
    groups = kind(architecture, **({"max_num_seqs": 8, "max_num_batched_tokens": 12} | settings))
    groups.submit("a", OTHERS["a"], 1, temperature=0.0)
    groups.submit("r", PROMPT, 3)
    groups.submit("long", LONG, 1, top_k=5, presence_penalty=0.5)
    groups.submit("c", OTHERS["c"], 2)
    for _ in range(4):
        groups.step()
    groups.submit("again", [*LONG[:16], 9, 9], 1, temperature=0.0)  # a prefix hit
    groups.finish()
    return groups


@cache
def samples_of_one(architecture: str) -> Any:
    """Return the samples of the whole model."""
    return samples(Groups, architecture).samples


ARCHITECTURES = ("llama", "qwen3_moe", "qwen3_5", "mistral", "gpt2")


@pytest.mark.parametrize(
    ("architecture", "depth"),
    [
        ("llama", 3),
        ("qwen3_5", 3),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("qwen3_moe", 1),
                *list(zip(ARCHITECTURES, cycle((3, 1)), strict=False))[3:],
                *zip(ARCHITECTURES, cycle((1, 3)), strict=False),
            )
        ),
        pytest.param("llama4_text", 3, marks=pytest.mark.slow),
    ],
)
def test_stages_give_the_tokens_of_the_whole_model(architecture: str, depth: int) -> None:
    """Tokens are greedy and sampled, with chunked prompts, prefix hits and forks. The models
    include a mixture, a hybrid, and window and chunked attention."""
    found = samples(StagedGroups, architecture, pipeline_depth=depth)
    assert found.samples == samples_of_one(architecture)


def test_native_stages_give_the_tokens_of_the_whole_model() -> None:
    settings = {"dtype": "float32", "attention_backend": "cpu"}
    found = samples(StagedGroups, "qwen3_moe", pipeline_depth=3, **settings)
    assert found.samples == samples(Groups, "qwen3_moe", **settings).samples


@pytest.mark.parametrize("mode", slow_but(("recompute", "swap"), "swap"))
def test_stages_preempt_like_the_whole_model(mode: str) -> None:
    size = pool_bytes(checkpoint("llama"), 21, 4)  # for both layers; each stage has one
    settings = {"preemption_mode": mode, "watermark": 0.0, "enable_prefix_caching": False}
    settings |= {"max_num_batched_tokens": 64}
    found = samples(
        StagedGroups, "llama", pipeline_depth=3, kv_cache_memory_bytes=size // 2, **settings
    )
    assert found.core.scheduler.memory.kv.num_blocks == 21
    wanted = samples(Groups, "llama", kv_cache_memory_bytes=size, **settings)
    assert found.samples == wanted.samples
    moves = found.num_moves["swap_out"]
    assert (moves > 0) == (mode == "swap")


def test_stages_give_the_beams_of_the_whole_model() -> None:
    found = []
    for kind in (Searches, StagedSearches):
        searches = kind(max_num_seqs=8, max_num_batched_tokens=16, pipeline_depth=3)
        searches.search("b", 3, 8)
        searches.search("c", 2, 6, (5, 6, 7))
        searches.finish()
        found.append({n: [b.token_ids for b in beams] for n, beams in searches.beams.items()})
    assert found[0] == found[1] and found[0]


def test_stages_verify_draft_tokens() -> None:
    """Some draft tokens are right and some wrong; the stages drop the rejected ones."""
    wanted = samples(Groups, "llama").samples
    groups = StagedGroups(max_num_seqs=8, max_num_batched_tokens=24, pipeline_depth=3)
    groups.submit("a", OTHERS["a"], 1, temperature=0.0)
    groups.submit("r", PROMPT, 3)
    num_accepted = 0
    while groups.core.has_work:
        if groups.core.num_in_flight == 0:
            drafts = []
            for sequence in groups.core.scheduler.rows.sequences():
                key = sequence.request.request_id, sequence.index
                known = sequence.known_tokens.tolist()
                answer = wanted[key][len(known) - sequence.num_prompt_tokens :]
                draft_tokens = [*answer[:2], 1, 1] if len(known) % 2 else [1]
                drafts.append(Draft(*key, len(known), draft_tokens))
            groups.core.control(Drafted(drafts))
            groups.core.plan()
        updates = groups.step()
        num_accepted += sum(len(update.token_ids) > 1 for update in updates)
    assert num_accepted >= 3
    assert groups.samples == {key: wanted[key] for key in groups.samples}


class StagedBench(Bench):
    num_stages = 2


class FailingLastStage(StagedBench):
    troubled_stage = 1


@pytest.mark.parametrize(
    ("when", "kind", "architecture"),
    in_turn(["before", "after"], [FailingLastStage, StagedBench], ["llama", "qwen3_5"]),
)
def test_guilty_request_fails_alone_in_any_stage(architecture: str, kind: type, when: str) -> None:
    """The other stages may be at any step."""
    bench = kind(
        checkpoint(architecture), when, pipeline_depth=3, max_num_seqs=6, max_num_batched_tokens=16
    )
    for i in range(4):
        bench.add(f"good {i}", prompt(i, 6 + 3 * i))
    bench.add("bad", with_poison(prompt(9, 20), 17))
    bench.add("good 4", prompt(8, 12))
    bench.finish()
    assert bench.failed() == {"bad"}
    bench.assert_exact(*(f"good {i}" for i in range(5)))
