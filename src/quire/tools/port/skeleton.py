"""Write the beginning of a class for a checkpoint's type, its test, and a package file for both.

Open differences are listed next to the class, which rejects them until they are implemented."""

import json
import keyword
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.models.registry import MODELS
from quire.tools.port.nearest import OTHER_NAMES, Checkpoint, Nearest

# The sizes of the test's model.
TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9,
    "max_position_embeddings": 128, "moe_intermediate_size": 24, "num_experts": 6,
    "num_local_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24,
}  # fmt: skip
NOT_IN_TINY = (
    "quantization_config", "auto_map", "transformers_version", "torch_dtype", "dtype",
    "architectures", "model_type", "_name_or_path",
)  # fmt: skip


def write_skeleton(checkpoint: Checkpoint, nearest: Nearest, folder: Path) -> list[Path]:
    """Write the files and return them. Raises ConfigError, before writing, if a file exists."""
    module = module_name(checkpoint.model_type)
    files = {
        f"{module}.py": model_file(checkpoint, nearest),
        f"test_{module}.py": test_file(checkpoint),
        "pyproject.toml": package_file(checkpoint),
    }
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError(
            f"{folder} has {', '.join(present)} already; nothing is overwritten. Give another"
            " directory with --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in files]


def module_name(model_type: str) -> str:
    """Return a type's name as a valid name of a module."""
    name = re.sub(r"\W", "_", model_type).lower()
    return f"model_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name


def class_name(model_type: str) -> str:
    return "".join(part.capitalize() for part in module_name(model_type).split("_"))


def model_file(checkpoint: Checkpoint, nearest: Nearest) -> str:
    """Return the text of the class's file."""
    base = MODELS[nearest.model_type]
    assert isinstance(base, type)
    name, ours = class_name(checkpoint.model_type), base.__name__
    is_open = not nearest.is_same
    text = f'"""{name}: {"as" if nearest.is_same else "nearest to"} {ours}.'
    text += ' Begun by `quire port`."""\n\n'
    text += "from dataclasses import replace\n\n"
    text += "from quire.base.errors import ModelError\n" if is_open else ""
    text += "from quire.spec.model_spec import ModelSpec\n"
    text += "from quire.models.parts.layers import ParamFactory\n"
    text += f"from {base.__module__} import {ours}\n\n"
    text += _open_lists(nearest) if is_open else "\n"
    difference = "but for what is open above" if is_open else "under another name"
    text += f'''class {name}({ours}):
    """What {ours} is, {difference}. Missing config fields have the same defaults."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
'''
    text += "        refuse_what_is_open(spec)\n" if is_open else ""
    text += f'        super().__init__(replace(spec, model_type="{nearest.model_type}"), factory)\n'
    return text + ("\n\n" + _refusal(checkpoint.model_type) if is_open else "")


def _open_lists(nearest: Nearest) -> str:
    ours = nearest.model_type
    fields = {field.name: field.value for field in nearest.fields}
    text = (
        f"# Fields of config.json that {ours} rejects or ignores, with the checkpoint's values.\n"
    )
    text += (
        "# Read each field with `spec.fields`, then remove it here. Also remove the fields that\n"
    )
    text += "# do not change numbers.\n"
    for field in nearest.fields:
        difference = f"{field.name}: {field.ours}"
        text += (
            textwrap.fill(difference, 100, initial_indent="#   ", subsequent_indent="#     ") + "\n"
        )
    text += f"OPEN_FIELDS = {_literal(fields)}\n"
    text += (
        f"# Tensors that {ours} cannot load (add a layer with a `Source`), and tensors that are\n"
    )
    text += "# missing here or have another shape: {name: (here, in ours)}.\n"
    tensors = {each.name: (each.theirs, each.ours) for each in nearest.tensors}
    return text + f"OPEN_TENSORS = {_literal(tensors)}\n\n\n"


def _refusal(model_type: str) -> str:
    return f'''def refuse_what_is_open(spec: ModelSpec) -> None:
    """Raise ModelError as long as anything is."""
    for name in OPEN_FIELDS:
        if spec.fields.has(name):
            raise spec.fields.error(name, "the class for {model_type} does not read it yet")
    if OPEN_TENSORS:
        names = ", ".join(OPEN_TENSORS)
        raise ModelError(f"the class for {model_type} has no place yet for {{names}}.")
'''


def test_file(checkpoint: Checkpoint) -> str:
    """Return the text of the test, which needs only the package."""
    model_type = checkpoint.model_type
    module, name = module_name(model_type), class_name(model_type)
    return f'''"""{name} compared with transformers: random weights, every way to compute it.

Begun by `quire port`. Where the class becomes one of quire's own, TINY becomes a variant in
tests/support/models/checkpoints.py, which all tests of architectures run over.
"""

from pathlib import Path

import pytest
import torch
import transformers
from {module} import {name}

from quire.base.settings.config import config_from_flat
from quire.models.registry import MODELS
from quire.tools.verify.report import WITHIN, lines
from quire.tools.verify.verify import Comparison, verify

TYPE = "{model_type}"
# The checkpoint's config with small sizes. Change what must fit them.
TINY = {_literal(tiny_config(checkpoint.config))}


@pytest.mark.skipif(
    TYPE not in transformers.CONFIG_MAPPING, reason=f"transformers knows no {{TYPE}}"
)
def test_it_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, TYPE, {name})
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(TYPE, **TINY)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # so large that every part matters
        weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.25)
    model.save_pretrained(tmp_path)
    report = verify(Comparison(config_from_flat(model=str(tmp_path))))
    assert report.verdict == WITHIN, "\\n".join(lines(report))
'''


def package_file(checkpoint: Checkpoint) -> str:
    """Return the text of pyproject.toml, whose entry point makes the type known."""
    module, name = module_name(checkpoint.model_type), class_name(checkpoint.model_type)
    return f"""[project]
name = "quire-{module.replace("_", "-")}"
version = "0.1"

[project.entry-points."quire.models"]
{checkpoint.model_type} = "{module}:{name}"

[tool.setuptools]
py-modules = ["{module}"]
"""


def tiny_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with small sizes; other fields stay as they are."""
    names = {other: ours for ours, others in OTHER_NAMES.items() for other in others}
    found = {}
    for name, value in config.items():
        if name in NOT_IN_TINY or name.endswith("_token_id"):
            continue
        size = TINY.get(names.get(name, name))
        found[name] = size if size is not None and _is_number(value) else value
    heads = ("num_attention_heads", *OTHER_NAMES["num_attention_heads"])
    old = next((config[each] for each in heads if each in config), None)
    if old is not None and config.get("num_key_value_heads") == old:
        found["num_key_value_heads"] = TINY["num_attention_heads"]
    layers = TINY["num_hidden_layers"]
    for name, value in found.items():
        if name.endswith("layer_types") and isinstance(value, list):
            found[name] = value[:layers]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _literal(value: Any, indent: str = "") -> str:
    """Return a value as Python code, with one line for each item of a dictionary."""
    if not isinstance(value, dict):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    inner = indent + "    "
    items = "".join(f"{inner}{_literal(k)}: {_literal(v, inner)},\n" for k, v in value.items())
    return f"{{\n{items}{indent}}}" if items else "{}"
