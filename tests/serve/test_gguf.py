"""`LLM("file.gguf")` gives the tokens and texts of the checkpoint that the file was made from."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.models.checkpoint.source import resolve_model
from tests.support.cases import slow_but
from tests.support.models.gguf_writer import BF16, F32, Q8_0, byte_level_metadata, convert
from tests.support.models.reference_checkpoints import checkpoint, reference_tokens, text_checkpoint

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53, 58, 9], [79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 8]]
QUESTIONS = ["What is 17 + 25?", "Who are you?"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens_of(path: Path, prompts: list[Any], **settings: Any) -> list[list[int]]:
    with LLM(str(path), disable_log_stats=True, max_model_len=96, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "architecture",
    slow_but(("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2"), "llama", "gpt2", "gemma2"),
)
def test_greedy_tokens_match_transformers(architecture: str, tmp_path: Path) -> None:
    folder = checkpoint(architecture)
    path = convert(folder, tmp_path / "model.gguf", F32)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    wanted = [reference_tokens(folder, prompt, 12) for prompt in PROMPTS]
    assert tokens_of(path, prompts, dtype="float64", attention_backend="torch") == wanted


def test_float32_file_gives_the_tokens_of_its_checkpoint(tmp_path: Path) -> None:
    folder = text_checkpoint()
    path = convert(folder, tmp_path / "model.gguf", F32, byte_level_metadata(folder))
    prompts = ["Hello, my name is", "Paged attention keeps"]
    assert tokens_of(path, prompts) == tokens_of(folder, prompts)


@pytest.fixture(scope="module")
def demo_metadata() -> dict[str, Any]:
    folder = resolve_model("demo").directory
    whole = (folder / "tokenizer.json").read_text()
    return byte_level_metadata(folder, "own") | {"tokenizer.huggingface.json": whole}


def answers(model: str, dtype: str) -> list[str]:
    with LLM(model, dtype=dtype, disable_log_stats=True) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        greedy = SamplingParams(temperature=0, max_tokens=40)
        return [output.outputs[0].text for output in llm.chat(conversations, greedy)]


def test_demo_as_gguf_gives_the_same_answers(tmp_path: Path, demo_metadata: dict[str, Any]) -> None:
    """The demo's weights are bfloat16: exact in the first file, approximate in the second."""
    folder = resolve_model("demo").directory
    wanted = answers("demo", "float32")
    path = convert(folder, tmp_path / "demo.gguf", BF16, demo_metadata)
    assert answers(str(path), "float32") == wanted
    assert "42" in wanted[0]
    path = convert(folder, tmp_path / "small.gguf", Q8_0, demo_metadata)
    assert path.stat().st_size < 0.6 * (folder / "model.safetensors").stat().st_size
    assert "42" in answers(str(path), "auto")[0]


def test_doctor_describes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = convert(checkpoint("qwen3"), tmp_path / "tiny.gguf", Q8_0)
    main(["doctor", str(path), "--json"])
    known = json.loads(capsys.readouterr().out)
    assert known["model"]["name"] == "tiny"
    assert known["model"]["tensors"] == "Q8_0 14, F32 11"
