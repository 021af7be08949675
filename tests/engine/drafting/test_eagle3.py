"""An EAGLE-3 head for the demo model. Its draft tokens equal those computed from the head's
definition and the target's states, whatever the scheduler does. Answers do not change."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.base.errors import ModelError
from quire.base.events import Stepped
from quire.base.messages import Draft, Drafted
from quire.base.requests.outputs import RequestOutput
from quire.base.settings.config import config_from_flat
from quire.engine.drafting.draft_pace import StepTimes
from quire.models.checkpoint.source import resolve_model
from quire.tools.devices import Device
from quire.tools.sizing.fit import fit
from tests.support.models.draft_heads import (
    DEMO_SHAPE,
    HeadByDefinition,
    HeadShape,
    head_weights,
    run_by_definition,
    write_demo_head,
    write_head,
)

BEGIN = "Once upon a time there was a little fox. One day the fox was in the park and saw a bear. "
TEXTS = [BEGIN, BEGIN + "The bear was", "A"]


def engine(head: Path | None, **settings: Any) -> LLM:
    if head is not None:
        method = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
        settings = {"speculative_config": method} | settings
    return LLM(
        "demo", max_model_len=128, disable_log_stats=True,
        **({"kv_cache_memory_bytes": 8 << 20, "dtype": "float32"} | settings),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no steps, so that every step gets drafts."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("head")
    write_demo_head(directory)
    return directory


def drafts_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Return a list that collects all later drafts."""
    core, found = llm.engine.client.core, list[Draft]()
    control = core.control

    def spy(message: Any) -> Any:
        if isinstance(message, Drafted):
            found.extend(message.drafts)
        return control(message)

    monkeypatch.setattr(core, "control", spy)
    return found


def run(llm: LLM) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return llm.generate(TEXTS, params, use_tqdm=False)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 8},
        pytest.param(
            {"kv_cache_memory_bytes": 9 * 102_400, "max_num_seqs": 3}, marks=pytest.mark.slow
        ),
    ],
    ids=["whole", "chunks", "short"],
)
@torch.inference_mode()
def test_drafts_match_the_definition(
    settings: dict[str, Any], head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the second run, where prompts are prefix hits."""
    with engine(head, **settings) as llm:
        drafts = drafts_of(llm, monkeypatch)
        outputs = run(llm) + run(llm)
    assert len(drafts) > 40
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 16
    if "max_num_seqs" in settings:
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
    tokens_of = {
        output.request_id: [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]
        for output in outputs
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model("demo").directory, dtype=torch.float32
    )
    weights, table = write_demo_head(head), model.get_input_embeddings().weight
    states = {
        name: model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for name, tokens in tokens_of.items()
    }
    for draft in drafts[:: len(drafts) // 10]:
        reads = DEMO_SHAPE.reads or ()
        # The library returns the last state after its norm.
        hidden = [*states[draft.request_id][:6], _last_state(model, tokens_of[draft.request_id])]
        read_TF = torch.cat([hidden[i][0] for i in reads], -1)[: draft.num_known - 1]
        known = tokens_of[draft.request_id][: draft.num_known]
        by_definition = HeadByDefinition(DEMO_SHAPE, weights, table)
        wanted = run_by_definition(by_definition, known, read_TF, len(draft.token_ids) - 1)[0]
        assert draft.token_ids == wanted


def _last_state(model: Any, tokens: list[int]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    model(torch.tensor([tokens]))
    hook.remove()
    return found[0]


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "bfloat16"},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param({"quantization": "int4"}, marks=pytest.mark.slow),
    ],
    ids=lambda how: next(iter(how.values())),
)
def test_head_does_not_change_answers(how: dict[str, Any], head: Path) -> None:
    """Bit for bit, with sampled tokens and two answers to each prompt."""
    params = SamplingParams(
        temperature=0.8, seed=5, n=2, max_tokens=50, ignore_eos=True, logprobs=2
    )
    found = []
    for each in (None, head):
        with engine(each, **how) as llm:
            steps: list[Stepped] = []
            core = llm.engine.client.core
            core.subscribe(lambda e, to=steps: to.append(e) if isinstance(e, Stepped) else None)
            outputs = llm.generate(TEXTS, params, use_tqdm=False)
        found.append([(c.token_ids, c.logprobs) for o in outputs for c in o.outputs])
    assert found[0] == found[1]
    assert sum(s.num_draft_tokens for s in steps) > sum(s.num_accepted for s in steps) > 0


def test_a_head_for_another_model_is_refused(tmp_path: Path) -> None:
    write_head(tmp_path, HeadShape())
    with pytest.raises(ModelError, match="for another model: .* hidden_size is 32, this model's"):
        engine(tmp_path)


def test_fit_counts_the_head(head: Path) -> None:
    method = {"method": "eagle3", "model": str(head)}
    found = []
    for speculation in (None, json.dumps(method)):
        config = config_from_flat(model="demo", speculative_config=speculation)
        found.append(fit(config, resolve_model("demo"), Device("a CPU", "cpu", 4 << 30)))
    plain, drafting = found
    num = sum(math.prod(each.shape) for each in head_weights(DEMO_SHAPE).values())
    more = sum(w.num_bytes for w in drafting.weights) - sum(w.num_bytes for w in plain.weights)
    assert more == pytest.approx(2 * num, rel=0.05)
