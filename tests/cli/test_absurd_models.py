"""Every command reports an impossible model in one line, without a traceback."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ModelError
from quire.base.settings.config import ModelConfig
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import resolve_model
from tests.serve.test_cache_identity import CONFIGS
from tests.support.commands import run
from tests.support.models.gguf_writer import F32, META, stored, write_gguf
from tests.support.processes.forks import run_forked
from tests.support.render.tiny_tokenizers import write_directory

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
CASES = [
    (json.dumps(CONFIGS["llama"] | {"num_attention_heads": 0}), "num_attention_heads is 0"),
    (json.dumps(CONFIGS["gpt2"] | {"n_embd": [32]}), "n_embd is [32]"),
    (json.dumps(CONFIGS["llama"] | {"rope_scaling": {"rope_type": "linear"}}), "has no factor"),
    (DEEP, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "message"), CASES)
@pytest.mark.parametrize("command", ["fit", "doctor", "generate"])
def test_invalid_config_is_reported_without_a_traceback(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    arguments = [str(tmp_path)]
    if command == "generate":
        arguments = ["hello", "--model", str(tmp_path), "--load-format", "dummy"]
    status, out, err = run(capsys, command, *arguments)
    assert status != 0
    assert message in out + err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(("text", "message"), [CASES[3]], ids=["deep"])
def test_serve_reports_an_invalid_config_without_a_traceback(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    command = [sys.executable, "-m", "quire.cli.main", "serve", str(tmp_path), "--port", "0"]
    ended = run_forked([*command, "--load-format", "dummy"])
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.context_length": [1]}, "context_length must be a whole number"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "rms_norm_eps is -1.0"),
        ({"llama.context_length": 2}, "max_position_embeddings is 2"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale is 2.0, which quire does not support"),
    ],
    ids=str,
)
def test_invalid_gguf_metadata_is_reported(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {"token_embd.weight": 4, "blk.0.attn_q.weight": 8, "blk.0.ffn_up.weight": 8}
    tensors = {name: stored(np.zeros((rows, 8)), F32) for name, rows in shapes.items()}
    path = write_gguf(tmp_path / "model.gguf", META | change, tensors)
    for command in ("fit", "doctor"):
        status, out, err = run(capsys, command, str(path))
        assert status != 0
        assert message in out + err


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("generation_config.json", {"eos_token_id": [[1]]}, r"eos_token_id is \[\[1\]\]"),
        ("generation_config.json", {"temperature": "hot"}, "sampling defaults that do not work"),
        ("config.json", {"text_config": 3}, "text_config is 3; it must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder must map"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"a": {}}}, "for example 'a'"),
    ],
)
def test_invalid_files_next_to_the_config_are_reported(
    file: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_directory(tmp_path, "byte_level")
    (folder / "config.json").write_text("{}")
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | fields))
    with pytest.raises(ModelError, match=message):
        build_text_side(ModelConfig(model=str(folder)), resolve_model(str(folder)))
