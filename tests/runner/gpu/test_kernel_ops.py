"""The whole engine on a GPU, by kernels: tokens and log-probabilities as on a CPU, by torch.

Without a GPU the device is a stand-in that works late (`late_device.py`), and Triton's interpreter
runs the kernels.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.ops import gpu
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.gpu import graphs
from quire.runner.step_ops import StepShape
from tests.support.cases import slow_but
from tests.support.models.reference_checkpoints import checkpoint, shallow, text_checkpoint
from tests.support.runner.late_device import LateDevice, on_the_host, stand_in, without_core

SETTINGS = {
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "block_size": 4,
    "kv_cache_memory_bytes": 1 << 20,
    "disable_log_stats": True,
    "enable_prefix_caching": True,
}
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(3 + 6 * i)]} for i in range(5)]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateDevice]]:
    """The created devices. Operations behave as on a GPU, without the C++ core."""
    made: list[LateDevice] = []
    if not INTERPRETED:
        yield made
        return

    def make(device: torch.device) -> LateDevice:
        made.append(LateDevice(device))
        return made[-1]

    stand_in(monkeypatch, make)
    with without_core(monkeypatch):
        yield made


def one_layer() -> dict[str, str]:
    """Return a model of one layer, which takes the interpreter half the time, and a tokenizer."""
    whole = str(text_checkpoint())
    return {"model": str(shallow(whole, 1)), "tokenizer": whole}


def summary_of(output: Any) -> list[tuple[Any, ...]]:
    """Return the tokens of each sequence, and rounded log-probabilities."""
    found = []
    for sequence in output.outputs:
        logprobs = [
            {token: (round(each.logprob, 3), each.rank) for token, each in position.items()}
            for position in sequence.logprobs or ()
        ]
        found.append((list(sequence.token_ids), logprobs, sequence.finish_reason))
    prompt = [
        position
        and {token: (round(each.logprob, 3), each.rank) for token, each in position.items()}
        for position in output.prompt_logprobs or ()
    ]
    return [*found, prompt]


def run_on_the_host(params: list[SamplingParams], rounds: int, **settings: Any) -> list[Any]:
    with on_the_host():
        return run("torch", params, rounds, is_host=True, **settings)


def run(
    backend: str, params: list[SamplingParams], rounds: int, is_host: bool = False, **settings: Any
) -> list[Any]:
    prompts = PROMPTS[: len(params)]
    on_gpu = not is_host and not INTERPRETED
    settings |= {"device": "cuda", "debug_transfers": True} if on_gpu else {"device": "cpu"}
    settings |= SETTINGS | {"attention_backend": backend} | settings
    with LLM(str(shallow(str(checkpoint("llama")), 1)), **settings) as llm:
        outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(rounds)]
    return [summary_of(output) for each in outputs for output in each]


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY] * 5,
    "sampled": [
        SamplingParams(temperature=0.9, seed=i, max_tokens=6, ignore_eos=True) for i in range(5)
    ],
    "filters": [
        SamplingParams(temperature=1.1, top_k=9, top_p=0.8, seed=4, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.1, min_p=0.02, seed=9 - 2**63, max_tokens=6, ignore_eos=True),
        GREEDY,
    ],
    "penalties": [
        SamplingParams(temperature=0.0, presence_penalty=1.5, max_tokens=7, ignore_eos=True),
        SamplingParams(
            temperature=0.8, frequency_penalty=1.0, repetition_penalty=1.3, seed=1, max_tokens=7,
            ignore_eos=True,
        ),
        GREEDY,
    ],
    "edits": [
        SamplingParams(temperature=0.0, logit_bias={5: 9.0, 6: -9.0}, max_tokens=6),
        SamplingParams(temperature=0.0, allowed_token_ids=[3, 4, 5], max_tokens=6, ignore_eos=True),
        SamplingParams(
            temperature=0.9, seed=3, min_tokens=4, stop_token_ids=list(range(80)), max_tokens=6
        ),
        GREEDY,
    ],
    "logprobs": [
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=5, ignore_eos=True),
        GREEDY,
        SamplingParams(temperature=0.7, seed=5, logprobs=0, max_tokens=5, ignore_eos=True),
    ],
    "all logprobs": [
        GREEDY, SamplingParams(temperature=0.0, logprobs=-1, max_tokens=3, ignore_eos=True)
    ],
    "prompt logprobs": [
        GREEDY,
        SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=3, ignore_eos=True),
    ],
    "n": [
        SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True),
        SamplingParams(
            n=2, temperature=1.0, seed=8, max_tokens=6, ignore_eos=True, presence_penalty=0.5,
            logit_bias={5: 2.0},
        ),
    ],
    "extras": [
        SamplingParams(temperature=0.0, dry_multiplier=5.0, dry_allowed_length=1, max_tokens=7,
                       ignore_eos=True),
        SamplingParams(temperature=1.2, seed=2, xtc_probability=0.7, xtc_threshold=0.02, top_k=30,
                       max_tokens=7, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.2, seed=2, logits_processors=[lambda ids, x: x.flip(0)],
                       presence_penalty=1.0, max_tokens=7, ignore_eos=True),
        GREEDY,
    ],
}  # fmt: skip


# Two kinds in one run, since each takes long alone.
KINDS["penalties and edits"] = [KINDS["penalties"][1], *KINDS["edits"][1:3]]
KINDS["filters and logprobs"] = [*KINDS["filters"][:2], *KINDS["logprobs"]]


@functools.cache
def expected(kind: str) -> list[Any]:
    """Return the results of one round on the host."""
    return run_on_the_host(KINDS[kind], rounds=1, max_logprobs=-1)


# The first round of the recorded tests below also begins with steps launched directly.
@pytest.mark.parametrize("kind", slow_but(KINDS, "extras"))
def test_direct_launches_equal_the_host(kind: str, devices: list[LateDevice]) -> None:
    found = run("triton", KINDS[kind], rounds=1, max_logprobs=-1, enforce_eager=True)
    assert found == expected(kind)
    assert not any(device.graphs for device in devices)


@pytest.mark.parametrize(
    ("kind", "has_triton"),
    [
        ("n", True),
        ("edits", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("n", False),
                ("prompt logprobs", True),
                ("prompt logprobs", False),
                ("edits", True),
            )
        ),
    ],
)
def test_attention_by_torch_equals_the_host(
    kind: str, has_triton: bool, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's attention needs lengths from the host, so no graph can hold it. Without triton, torch
    also runs all other operations."""
    monkeypatch.setattr(gpu, "has_triton", lambda: has_triton)
    found = run("torch", KINDS[kind], rounds=1, max_logprobs=-1, pipeline_depth=3)
    assert found == expected(kind)
    assert all(device.most_waiting > 1 and not device.graphs for device in devices)
    assert len(devices) == 1 or not INTERPRETED


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Count replays of mixed steps and of others. Mixed kinds are recorded at their first step."""
    counted: Counter[bool] = Counter()
    first = graphs.Recorded.first

    def count(recorded: graphs.Recorded, shape: StepShape) -> list[torch.Tensor]:
        counted[recorded.size.is_mixed] += 1
        return first(recorded, shape)

    monkeypatch.setattr(graphs.Recorded, "first", count)
    monkeypatch.setattr(graphs, "FIRST_TIMES_MIXED", 0)
    return counted


@pytest.mark.parametrize(
    "kind",
    slow_but(
        [kind for kind in KINDS if kind != "extras"],
        "penalties and edits",
        "prompt logprobs",
    ),
)
def test_whole_graphs_equal_the_host(
    kind: str, devices: list[LateDevice], replays: Counter[bool]
) -> None:
    """The second round replays the graphs of the first; mixed steps replay in pieces."""
    check_recorded(kind, "full", replays)


@pytest.mark.parametrize(
    "kind",
    slow_but(["greedy", "filters", "logprobs", "filters and logprobs"], "logprobs"),
)
def test_graphs_in_pieces_equal_the_host(
    kind: str, devices: list[LateDevice], replays: Counter[bool]
) -> None:
    check_recorded(kind, "piecewise", replays)


def check_recorded(kind: str, compilation: str, replays: Counter[bool]) -> None:
    found = run("triton", KINDS[kind], rounds=2, max_logprobs=-1, compilation=compilation)
    assert found == 2 * expected(kind)
    assert kind == "all logprobs" or replays[False] > 0
    assert kind in ("all logprobs", "prompt logprobs") or replays[True] > 0


FEW_BYTES = 10 * 2 * 2 * 4 * 8 * 8  # the size of ten blocks
CASES: dict[str, dict[str, Any]] = {
    "recomputed": {"kv_cache_memory_bytes": FEW_BYTES, "max_model_len": 36},
    "swapped": {
        "kv_cache_memory_bytes": FEW_BYTES,
        "max_model_len": 36,
        "preemption_mode": "swap",
    },
    "depth 4": {"pipeline_depth": 4},
    "depth 1": {"pipeline_depth": 1},
    "no prefix cache": {"enable_prefix_caching": False, "pipeline_depth": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_do_not_depend_on_memory_settings(case: str, devices: list[LateDevice]) -> None:
    kind = KINDS["greedy"][:4] + KINDS["filters"][:1]
    found = run("triton", kind, rounds=2, **CASES[case])
    assert found == run_on_the_host(kind, rounds=2, **CASES[case])
