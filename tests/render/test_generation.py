"""Sampling defaults and ends of sequence from a model's files."""

import json
from pathlib import Path

import pytest

from quire.base.errors import ModelError
from quire.base.requests.sampling_params import SamplingParams
from quire.render.generation import read_generation_defaults


def write(folder: Path, name: str, **values: object) -> None:
    (folder / name).write_text(json.dumps(values))


def test_generation_config_sets_defaults_and_eos_tokens(tmp_path: Path) -> None:
    write(
        tmp_path, "generation_config.json", eos_token_id=[7, 9], temperature=0.6, top_k=20,
        top_p=0.95, max_new_tokens=99, min_p=None, do_sample=True,
    )  # fmt: skip
    found = read_generation_defaults(tmp_path, tokenizer_eos=9)
    assert found.eos_token_ids == (9, 7)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=99)
    assert found.default_sampling_params() == expected
    bare = read_generation_defaults(tmp_path, use_sampling=False)
    assert bare.default_sampling_params() == SamplingParams() and bare.eos_token_ids == (7, 9)


def test_eos_tokens_are_read_from_the_model_config(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path).eos_token_ids == ()
    write(tmp_path, "config.json", text_config={"eos_token_id": 3})
    assert read_generation_defaults(tmp_path).eos_token_ids == (3,)
    write(tmp_path, "config.json", eos_token_id=4)
    assert read_generation_defaults(tmp_path).eos_token_ids == (4,)


def test_invalid_defaults_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", top_p=3)
    with pytest.raises(ModelError, match="top_p"):
        read_generation_defaults(tmp_path)
