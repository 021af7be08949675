"""The quantization that `run` and `serve` choose automatically (`cli/commands/serve.py`)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import OutOfMemory
from quire.base.settings.config import config_from_flat
from quire.cli import model_files
from quire.cli.commands import serve
from quire.cli.main import main
from quire.cli.model_files import fitting_quantization, may_quantise, quantization_notice
from quire.models.checkpoint.source import resolve_model, resolve_source
from quire.ops.host.native import core
from quire.tools.devices import CPU, GPU, Device
from quire.tools.sizing.fit import fit
from tests.support.models.checkpoints import VARIANTS, write_own

MIB = 1 << 20
SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 16, "max_num_batched_tokens": 16}
pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


SHAPE = VARIANTS["llama"][1] | {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose weights are most of its memory."""
    folder = tmp_path_factory.mktemp("model")
    write_own(folder, "llama", SHAPE)
    return folder


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Return the choice for a machine with this memory."""

    def choose(path: Path, memory: int, kind: str = CPU, **settings: Any) -> str | None:
        device = Device("a machine", kind, memory)
        monkeypatch.setattr(model_files, "find_device", lambda name: device)
        config = config_from_flat(**SMALL, model=str(path), **settings)
        return fitting_quantization(config, resolve_source(config.model))

    return choose


def fits(path: Path, memory: int, quantization: str | None) -> bool:
    config = config_from_flat(**SMALL, model=str(path), quantization=quantization)
    try:
        fit(config, resolve_source(config.model), Device("a machine", CPU, memory))
    except OutOfMemory:
        return False
    return True


def test_best_quantization_that_fits_is_chosen(
    checkpoint: Path, choose: Callable[..., str | None]
) -> None:
    found = []
    for memory in range(36 * MIB, MIB, -2 * MIB):
        name = choose(checkpoint, memory)
        if not found or found[-1][0] != name:
            found.append((name, memory))
    assert [name for name, _ in found] == [None, "int8", "int4", None]
    assert fits(checkpoint, found[0][1], None)
    for name, memory in found[1:3]:
        assert fits(checkpoint, memory, name) and not fits(checkpoint, memory, None)
    assert not fits(checkpoint, found[2][1], "int8") and not fits(checkpoint, found[3][1], "int4")


def test_user_settings_disable_the_choice(
    checkpoint: Path, choose: Callable[..., str | None]
) -> None:
    memory = next(m for m in range(36 * MIB, MIB, -2 * MIB) if choose(checkpoint, m) == "int8")
    assert choose(checkpoint, memory, quantization="none") is None
    assert choose(checkpoint, memory, quantization="int4") is None
    assert choose(checkpoint, memory, device="cuda") is None
    assert choose(checkpoint, memory, kind=GPU) is None
    assert choose(checkpoint, memory, tensor_parallel_size=2) is None
    assert choose(checkpoint, memory, load_format="dummy") is None


def test_quantised_checkpoint_is_not_quantised_again(
    checkpoint: Path, tmp_path: Path, choose: Callable[..., str | None]
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose(tmp_path, 2 * MIB) is None


def test_notice_shows_the_size_and_how_to_disable_it(checkpoint: Path) -> None:
    text = quantization_notice("int4", resolve_model(str(checkpoint)))
    assert "quantized to int4" in text and "GiB" in text and "--quantization none" in text


def test_serve_applies_the_choice(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_from_flat(model=str(checkpoint))
    assert serve._fitting(config) is config
    monkeypatch.setattr(model_files, "fitting_quantization", lambda config, source: "int4")
    assert serve._fitting(config).model.quantization == "int4"
    assert "quantized to int4" in capsys.readouterr().err


def test_serve_checks_certificates_before_a_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_fitting", lambda engine: pytest.fail("the model was fetched"))
    assert main(["serve", "demo", "--ssl-certfile", "/no", "--ssl-keyfile", "/no"]) == 1
    assert "ssl_certfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "none"}, {"device": "cuda"}, {"tensor_parallel_size": 2}],
)
def test_serve_fetches_no_model_with_fixed_settings(settings: dict[str, Any]) -> None:
    assert not may_quantise(config_from_flat(model="some/model", **settings))
    assert may_quantise(config_from_flat(model="some/model"))
