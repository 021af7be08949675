"""No step is launched kernel by kernel if kinds are recorded at their first step."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from quire import LLM, SamplingParams
from quire.base.requests.sampling_params import StructuredOutputsParams
from quire.engine.drafting.draft_pace import StepTimes
from quire.ops.kernels.launch import INTERPRETED
from quire.runner import memory_plan
from quire.runner.drafting.draft_steps import VerifyStep
from quire.runner.gpu import graphs, sizes
from quire.runner.steps import PlainStep
from tests.runner.gpu.test_kernel_ops import devices, one_layer, summary_of  # noqa: F401 (a fixture)
from tests.support.cases import slow_but
from tests.support.runner.late_device import on_the_host

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's"),
    pytest.mark.usefixtures("devices"),
]

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
MASKED = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1)
MASKED.structured_outputs = StructuredOutputsParams(choice=["the little fox"])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=9, top_k=9, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=2, max_tokens=9, n=2, logit_bias={50: 9.0, 51: 9.0}),
    SamplingParams(temperature=1.0, seed=2, max_tokens=9, n=2),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps launched kernel by kernel, and those replayed with drafts and without. A kind
    is recorded at its first step."""
    counted: Counter[str] = Counter()

    def count(kind: type, name_of: Any) -> None:
        first = kind.first

        def counting(step: Any, shape: Any) -> Any:
            counted[name_of(step)] += 1
            return first(step, shape)

        monkeypatch.setattr(kind, "first", counting)

    def replayed(recorded: graphs.Recorded) -> str:
        size = recorded.size
        return "drafted" if size.drafts else "mixed" if size.is_mixed else "plain"

    count(graphs.Recorded, replayed)
    count(PlainStep, lambda step: "alone")
    count(VerifyStep, lambda step: "alone")
    monkeypatch.setattr(graphs, "FIRST_TIMES", 0)
    monkeypatch.setattr(graphs, "FIRST_TIMES_MIXED", 0)
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    return counted


def answers(params: list[SamplingParams], **settings: Any) -> list[Any]:
    prompts = ["one two one two", "the fox the fox", "a"][: len(params)]
    with LLM(
        **one_layer(), dtype="float32", max_model_len=64, block_size=4, max_num_seqs=4,
        disable_log_stats=True, kv_cache_memory_bytes=1 << 20,
        **{"attention_backend": "triton"} | settings,
    ) as llm:  # fmt: skip
        return [summary_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]


CASES: dict[str, tuple[list[SamplingParams], dict[str, Any]]] = {
    "drafts of the device": (PARAMS[:3], {"speculative_config": NGRAM, "pipeline_depth": 2}),
    "drafts of the host": (PARAMS[:3:2], {"speculative_config": NGRAM, "pipeline_depth": 1}),
    "masks and drafts": (
        [MASKED, PARAMS[1]], {"speculative_config": NGRAM, "pipeline_depth": 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("compilation", ["full", pytest.param("piecewise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_but(CASES, "masks and drafts"))
def test_every_kind_of_step_is_replayed(
    case: str, compilation: str, launched: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Steps have draft tokens, masks and short prompts. The tokens equal those without graphs."""
    params, settings = CASES[case]
    found = answers(params, compilation=compilation, **settings)
    assert launched["alone"] == 0
    assert launched["drafted"] > 0 and launched["mixed"] > 0
    assert "recorded" not in caplog.text
    with on_the_host():
        assert found == answers(params, attention_backend="torch", **settings)
    assert launched["alone"] > 0


def variant(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of Triton's compilation: constants, types, and which numbers are 1 or
    multiples of 16."""
    fixed = function.kwargs.get("do_not_specialize") or ()
    anywhere = function.kwargs.get("do_not_specialize_on_alignment") or ()
    found: list[Any] = [function.fn.__module__, function.__name__]
    for name, value in [*zip(function.arg_names, args, strict=False), *sorted(named.items())]:
        if isinstance(value, torch.Tensor):
            is_aligned = name in anywhere or value.data_ptr() % 16 == 0
            found.append((str(value.dtype), is_aligned))
        elif name in named:
            found.append((name, str(value)))
        elif name not in fixed:
            found.append((type(value).__name__, value == 1, value % 16 == 0))
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["none", "ngram"])
def test_warm_up_compiles_every_kernel(
    drafts: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps with prompts, drafts by host and device, masks and forks replay recorded graphs. Later
    launches and recordings use kernels that were launched before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    has_drafts = drafts != "none"
    monkeypatch.setattr(graphs, "FIRST_TIMES", 2)
    monkeypatch.setattr(graphs, "FIRST_TIMES_MIXED", 3)
    for place, name, few in (
        (sizes, "MIXED_TOKENS", (64,)), (sizes, "WARM_TOKENS", (64,)),
        (sizes, "WARM_TOKENS_OF_ALL", (64,)), (memory_plan, "MIXED_TOKENS", (64,)),
        (sizes, "MORE_POSITIONS", 32), (memory_plan, "MORE_POSITIONS", 32),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, few)
    variants: set[tuple[Any, ...]] = set()
    run = interpreter.InterpretedFunction.run

    def noting(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        variants.add(variant(function, args, named))
        return run(function, *args, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", noting)
    settings: dict[str, Any] = {"speculative_config": NGRAM if has_drafts else {"method": "none"}}
    settings |= {"pipeline_depth": 2, "graph_warmup": True, "max_num_seqs": 4 if has_drafts else 2}
    with LLM(
        **one_layer(), dtype="float32", max_model_len=64, block_size=4,
        disable_log_stats=True, attention_backend="triton", kv_cache_memory_bytes=1 << 20,
        **settings,
    ) as llm:  # fmt: skip
        known = set(variants)
        assert len(known) > 20 and not launched
        prompts = ["one two one two", "the fox the fox", "a", "one two"]
        found = llm.generate(prompts, [*PARAMS[:2], PARAMS[3], MASKED], use_tqdm=False)
    assert sorted(map(str, variants - known)) == []
    assert launched["alone"] == 0 and launched["mixed"] > 0
    assert (launched["drafted"] > 0) == has_drafts
    assert all(output.outputs[0].token_ids for output in found)
