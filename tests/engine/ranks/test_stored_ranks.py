"""Ranks with integer weights, keys and values, and chunked prompts match one process, and their
recordings replay.

Each rank has whole groups of 32 inputs, so that rounding is identical on all ranks.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.ops.host.native import core
from quire.render.renderer import RenderedPrompt
from tests.models.test_rank_formats import INNER, OF_TYPE
from tests.support.engine.scenarios import COMMON, WORDS
from tests.support.models import quantised_writers as writers
from tests.support.models.checkpoints import write_own
from tests.support.render.tiny_tokenizers import fresh_directory

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
TWO = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PARAMS = [GREEDY, SamplingParams(max_tokens=16, seed=3, ignore_eos=True)]
INT8 = {"dtype": "float32", "kv_cache_dtype": "int8"}
KINDS: dict[str, dict[str, Any]] = {
    "gptq": INT8,
    "hybrid": INT8 | {"quantization": "int8", "quantization_group_size": 32},
}


@cache
def model(kind: str) -> Path:
    folder = fresh_directory()
    if kind == "gptq":
        return writers.write(folder, writers.gptq(4, 32), intermediate_size=INNER)[0]
    sizes = {"hidden_size": 64, "intermediate_size": INNER}
    config = writers.SIZES | OF_TYPE["qwen3_5_text"] | sizes
    return write_own(folder, "qwen3_5_text", config).directory


def in_pieces(llm: LLM) -> list[int]:
    """Return the tokens after an open prompt of three pieces, each sent when the previous one is
    computed."""
    client, scheduler = llm.engine.client, llm.engine.client.core.scheduler
    made = llm.engine.requests.make(RenderedPrompt(WORDS[:5]), GREEDY)
    request = msgspec.structs.replace(made, is_open=True)
    client.add(request)
    for begin, end in ((5, 11), (11, len(WORDS))):
        while scheduler.lifecycle.sequences[request.request_id].num_computed_tokens < begin - 1:
            assert client.step() == []
        client.append(request.request_id, WORDS[begin:end], is_last=end == len(WORDS))
    while True:
        for output in client.step():
            if output.finished:
                return list(output.outputs[0].token_ids)


def served(kind: str, **settings: Any) -> list[list[int]]:
    with LLM(str(model(kind)), **(COMMON | KINDS[kind] | settings)) as llm:
        outputs = llm.generate([WORDS, WORDS[3:] * 2], PARAMS, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        llm.reset_prefix_cache()
        return [*found, in_pieces(llm)]


@cache
def by_one_process(kind: str) -> list[list[int]]:
    found = served(kind)
    assert found[2] == found[0]
    return found


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("gptq", TWO, marks=pytest.mark.slow),
        ("hybrid", TWO),
        pytest.param("gptq", STAGES, marks=pytest.mark.slow),
        pytest.param("hybrid", STAGES, marks=pytest.mark.slow),
    ],
)
def test_quantised_ranks_match_one_process_and_replay(
    kind: str,
    ranks: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = tmp_path / "run"
    found = served(kind, **ranks, record=str(record), record_tokens=True)
    assert found == by_one_process(kind)
    with_model = ["--with-model"] if kind == "gptq" else []
    assert main(["replay", str(record), *with_model]) == 0
    assert "3 requests: all plans identical" in capsys.readouterr().out
    assert ("48 sampled tokens are identical" in caplog.text) == bool(with_model)
