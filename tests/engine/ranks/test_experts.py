"""Ranks with whole experts of a mixture match one process and report their load."""

import re
from typing import Any

from quire import LLM, SamplingParams
from quire.base.settings.cache_config import CacheConfig
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.ranks.executor import RankExecutor
from tests.support.engine.scenarios import COMMON, WORDS
from tests.support.models.reference_checkpoints import LLAMA_LIKE, checkpoint
from tests.support.processes.servers import wait_until

EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
NUM_TOKENS, CHOSEN = 8, 3


def served(**settings: Any) -> tuple[list[list[int]], list[int]]:
    """Return the tokens, and the load of each rank's experts according to the metrics text."""
    all_params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=NUM_TOKENS, seed=4, top_p=0.8, ignore_eos=True),
    ]
    common = COMMON | {"dtype": "float32", "enable_prefix_caching": False}
    with LLM(str(checkpoint("qwen3_moe")), **(common | settings)) as llm:
        outputs = llm.generate([WORDS] * len(all_params), all_params, use_tqdm=False)
        core = llm.engine.client.core
        loads: list[int] = []
        if isinstance(core.executor, RankExecutor):
            times = core.executor.times
            metrics = EngineMetrics(8, 96, False)
            exposition = Exposition(metrics, core.view, "m", CacheConfig(), ranks=times)

            def all_pairs_are_exported() -> bool:
                found = r'^quire:rank_expert_pairs_total{.*rank="(\d)"} (\S+)$'
                exported = dict(re.findall(found, exposition.text(), re.MULTILINE))
                loads[:] = [int(float(exported[each])) for each in sorted(exported)]
                num_computed = len(all_params) * (len(WORDS) + NUM_TOKENS - 1)
                return sum(loads) == num_computed * CHOSEN * LLAMA_LIKE["num_hidden_layers"]

            wait_until(all_pairs_are_exported, "all pairs are exported", 5)
        return [list(output.outputs[0].token_ids) for output in outputs], loads


def test_whole_experts_on_two_ranks_match_one_process() -> None:
    tokens, loads = served(**EXPERTS)
    assert tokens == served()[0]
    assert len(loads) == 2 and all(loads) and loads[0] != loads[1]
