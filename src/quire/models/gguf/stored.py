"""What the tensors of a GGUF file are called here, and how layers that are quantised in it are
packed. No torch.
"""

import math
import re
from collections.abc import Iterable, Mapping

from quire.base.gguf import GGUFFile, TensorKind
from quire.base.model_spec import ModelSpec
from quire.models.formats import StoredFormat
from quire.models.outline import PLAIN, Part
from quire.ops.formats import SIZES, Quantization

FORMATS = {"Q8_0": Quantization("int8_f16", 32), "Q4_0": Quantization("int4_f16", 32)} | {
    name: Quantization(name.lower(), SIZES[name.lower()].group)
    for name in ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}

DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
DECODER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def stored_formats_of_parts(
    file: GGUFFile, spec: ModelSpec, parts: Iterable[Part]
) -> dict[int, StoredFormat]:
    """Choose what to pack an outline's parts as, by index, without those of plain numbers."""
    kinds = kinds_by_name(file, spec)
    found: dict[int, StoredFormat] = {}
    for index, part in enumerate(parts):
        format = None
        if part.kind != PLAIN:
            sizes = {
                name: math.prod(shape) // part.shape[1] for name, shape in part.tensors.items()
            }
            format = stored_format(sizes, kinds)
        if format is not None:
            found[index] = format
    return found


def kinds_by_name(file: GGUFFile, spec: ModelSpec) -> dict[str, TensorKind]:
    """Tell how each tensor is stored, by the name that our layers ask for."""
    return {our_name(place.name, spec): place.kind for place in file.tensors.values()}


def stored_format(
    outputs: Mapping[str, int], kinds: Mapping[str, TensorKind]
) -> StoredFormat | None:
    """Choose what to pack a layer as whose weight these tensors fill, each so many outputs; None
    where one of them holds plain numbers, or is not there.

    The core multiplies all of GGUF's quantised formats as they are, also where the parts of a layer
    are of several.
    """
    if not outputs or any(name not in kinds or kinds[name].is_float for name in outputs):
        return None
    stretches: list[tuple[int, Quantization]] = []
    for name, count in outputs.items():
        format = FORMATS[kinds[name].name]
        if stretches and stretches[-1][1] == format:
            count += stretches.pop()[0]
        stretches.append((count, format))
    return StoredFormat(tuple(stretches), as_blocks=True)


def our_name(name: str, spec: ModelSpec) -> str:
    """Return the name that our layers ask for; what they have no name for keeps its own."""
    is_gpt2 = spec.model_type == "gpt2"
    stem, _, kind = name.rpartition(".")
    found = IN_LAYER.fullmatch(stem)
    if found is None:
        ours = (GPT2 if is_gpt2 else DECODER).get(stem)
        return name if ours is None else f"{ours}.{kind}"
    layer, part = found.groups()
    part = (GPT2_LAYER if is_gpt2 else DECODER_LAYER).get(part, "")
    prefix = "transformer.h" if is_gpt2 else "model.layers"
    return f"{prefix}.{layer}.{part}.{kind}" if part else name
