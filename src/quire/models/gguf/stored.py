"""What the tensors of a GGUF file are called here, and how layers that are quantised in it are
packed. No torch.
"""

import re
from collections.abc import Iterable, Mapping

from quire.base.gguf import GGUFFile, TensorKind
from quire.base.model_spec import ModelSpec
from quire.models.formats import StoredFormat
from quire.models.outline import PLAIN, Part
from quire.ops.formats import Quantization

AS_STORED = {"Q8_0": Quantization("int8_f16", 32), "Q4_0": Quantization("int4_f16", 32)}
OTHERS = Quantization("int8", 32)

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
            format = stored_format(part.tensors, kinds)
        if format is not None:
            found[index] = format
    return found


def kinds_by_name(file: GGUFFile, spec: ModelSpec) -> dict[str, TensorKind]:
    """Tell how each tensor is stored, by the name that our layers ask for."""
    return {our_name(place.name, spec): place.kind for place in file.tensors.values()}


def stored_format(names: Iterable[str], kinds: Mapping[str, TensorKind]) -> StoredFormat | None:
    """Choose what to pack a layer as whose weight these tensors fill; None for plain numbers.

    The core multiplies the numbers of Q8_0 and Q4_0 as they are, if all parts of a layer are that.
    Others, all of at most 6 bits, become int8 in groups of 32, which adds a few hundredths to the
    error that they have.
    """
    parts = {kinds[name] for name in names if name in kinds}
    if not parts or any(kind.is_float for kind in parts):
        return None
    of = {kind.name for kind in parts}
    if len(of) == 1 and of <= AS_STORED.keys():
        return StoredFormat(AS_STORED[min(of)], as_blocks=True)
    return StoredFormat(OTHERS, as_blocks=False)


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
