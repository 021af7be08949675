"""A replay with the model follows the grammars that the recorded requests had."""

import json
from itertools import count
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.base.requests.numerics import PARTS, fingerprint
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.engine.attachments.recorder import Recorder
from quire.engine.recording.files import read_recording
from quire.scheduler.decisions import Decisions
from quire.tools.replay_model import _numerics_notes, replay_with_model
from tests.render.media.test_processors import picture
from tests.support.cases import slow_but
from tests.support.engine.recorded_runs import begin_segment
from tests.support.render.tiny_tokenizers import write_vision_model

PROMPTS = ["Once upon a time", "The fox said", "The sea"]
NAME = {"enum": ["fox", "cow"]}
SCHEMA = {
    "type": "object",
    "properties": {"name": NAME},
    "required": ["name"],
    "additionalProperties": False,
}


def guided(**constraint: object) -> SamplingParams:
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=7)
    params.structured_outputs = StructuredOutputsParams(**constraint)
    return params


def record(path: Path, depth: int) -> list[str]:
    """Record rows with grammars alongside one without; return the answers."""
    plain = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
    params = [guided(json=SCHEMA), plain, guided(choice=["the little fox", "the little cow"])]
    with LLM(
        "demo", record=str(path), record_tokens=True, disable_log_stats=True, pipeline_depth=depth
    ) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("depth", slow_but((1, 2), 2))
def test_replay_follows_the_grammars(tmp_path: Path, depth: int) -> None:
    answers = record(tmp_path, depth)
    assert json.loads(answers[0])["name"] in ("fox", "cow")
    outcome = replay_with_model(read_recording(tmp_path), {})
    assert outcome.difference is None
    assert "sampled tokens are identical" in outcome.notes[-1]


def test_segment_that_begins_within_an_answer_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests come from a snapshot, so their grammars are compiled again."""
    schedule, calls = Recorder.schedule, count()

    def cut_after_four(recorder: Recorder, now: float) -> Decisions:
        if next(calls) == 4:
            begin_segment(recorder)
        return schedule(recorder, now)

    monkeypatch.setattr(Recorder, "schedule", cut_after_four)
    record(tmp_path, 1)
    segments = list(read_recording(tmp_path))
    assert len(segments) == 2
    outcome = replay_with_model(segments, {})
    assert outcome.difference is None
    assert "sampled tokens are identical" in outcome.notes[-1]


def test_replay_stops_at_an_encoded_image(tmp_path: Path) -> None:
    """A recording has no pixels, so only the steps before the image are compared."""
    folder = write_vision_model(tmp_path / "model", "gemma3")
    text = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 64}  # fmt: skip
    tower = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 20,
             "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14,
             "image_size": 56}  # fmt: skip
    config = {"model_type": "gemma3", "text_config": text, "vision_config": tower,
              "mm_tokens_per_image": 4, "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    prompt = {"prompt": "ab<start_of_image>", "multi_modal_data": {"image": picture(56, 56)}}
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    path = tmp_path / "recording"
    with LLM(
        str(folder), load_format="dummy", kv_cache_memory_bytes=4 << 20, record=str(path),
        record_tokens=True, disable_log_stats=True,
    ) as llm:  # fmt: skip
        llm.generate("ab", params, use_tqdm=False)
        llm.generate(prompt, params, use_tqdm=False)
    outcome = replay_with_model(read_recording(path), {})
    assert outcome.difference is None
    assert "encodes an image or a video, whose pixels are not in the recording" in outcome.notes[0]
    assert outcome.notes[1] == "3 sampled tokens are identical"


def test_different_numerics_give_notes() -> None:
    """A fingerprint of another version also gives only a note."""
    ours = dict.fromkeys(PARTS, "x")
    assert _numerics_notes(fingerprint(ours), ours) == _numerics_notes(None, ours) == []
    [note] = _numerics_notes("q0-1-2", ours)
    assert "not compared" in note and "q0-1-2" in note
    recorded = fingerprint(ours | {"device": "y", "weights": "y"})
    device, weights = _numerics_notes(recorded, ours)
    assert device == "the device differs from the recorded engine's; here: x"
    assert weights.startswith("the weights differ ")
