"""Survey every text type of the installed transformers; write that section of
docs/use/model-table.md.

    python -m tests.models.type_survey [TYPE ...]     # all, or these; writes the section

Each type is tested with a tiny random checkpoint. quire's class or transformers' class runs it with
transformers' greedy tokens, or quire refuses it with a reason. Anything else is a failure.
"""

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelError
from quire.models.registry import ENCODERS, model_spec
from quire.spec.model_spec import QUIRE
from tests.models.image_matrix import PAGE
from tests.support.models.transformers_checkpoints import SHARING, use_exact_attention

VOCAB, MAX_LEN, NUM_TOKENS = 97, 48, 6
PROMPTS = [[5, 17, 3, 40, 22, 9, 31, 14, 2, 44, 27], [8, 60, 71]]
OWN, POOLS, THEIRS = "quire's class", "quire's class, which pools", "transformers' class"
UNTRIED = "transformers makes no tiny checkpoint of it"
TYPES_OF_A_ROW = 12
MAX_PARAMETERS = 100_000_000  # of a checkpoint that is still tiny
PARTS = "sub_configs_defaults"  # of classes that choose a part's class by the part's config
HEAD, END = "\n## All text types of transformers\n", "\n## Loss by format\n"
INTRO = f"""
Each type is tried with a tiny checkpoint with random weights. *{OWN}* and
*{THEIRS}* give transformers' greedy tokens. The other types are refused with the reason.
`python -m tests.models.type_survey` writes this section, and `make test-long` compares it.

| result | types |
| --- | --- |
"""
# Parts of messages that differ between types refused for the same reason.
SAME_REASON = (
    (r"^\w+ cannot run on paged memory: ", ""),
    (r"^transformers' class of \S+ cannot run over paged memory: ", ""),
    (r"\. Use a model .*$", ""),
    (r"its layers \[.*?\] are", "some layers are"),
    (r"layer \d+ \(\w+\)", "a layer"),
    (r"[\w.]+ \(\w+\) computes", "a module computes"),
    (r"cannot create \w+:", "cannot create it:"),
    (r"is \{.*\};", "is set;"),
    (r"class for '\w+'; .*$", "class for its text part"),
    (r"(differ in \w+): .*$", r"\1"),
)


def _named(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# Sizes of a tiny model, by the names of config fields.
SIZES: Mapping[str, int] = (
    _named("vocab_size vocab_size_per_layer_input", VOCAB)
    | _named("hidden_size n_embd d_model dim embed_dim emb_dim embedding_size", 32)
    | _named("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth", 4)
    | _named("num_attention_heads n_head n_heads num_heads", 4)
    | _named("decoder_attention_heads encoder_attention_heads", 4)
    | _named("num_key_value_heads n_kv_heads num_kv_heads", 2)
    | _named("intermediate_size ffn_dim n_inner inner_dim d_ff ffn_hidden_size", 40)
    | _named("moe_intermediate_size shared_expert_intermediate_size", 40)
    | _named("decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp", 40)
    | _named("head_dim global_head_dim attention_head_dim", 8)
    | _named("max_position_embeddings n_positions max_seq_len", 64)
    | _named("num_experts num_local_experts n_routed_experts", 4)
    | _named("num_experts_per_tok moe_topk", 2)
    | _named("n_group topk_group", 1)
    | _named("kv_lora_rank q_lora_rank", 12)
    | _named("qk_nope_head_dim v_head_dim", 8)
    | _named("qk_rope_head_dim rotary_dim", 4)
    | _named("hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim", 8)
    | _named("linear_num_key_heads", 2)
    | _named("linear_num_value_heads", 4)
    | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    | {"image_size": 16, "patch_size": 8}
)
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
# Further fields that some types need.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "bamba": STATES,
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3": {"mm_tokens_per_image": 49},
    "gemma3n_text": SHARING,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": STATES,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "glm4_moe_lite": {"num_key_value_heads": 4, "head_dim": 4},
    "longcat_flash": {"head_dim": 4},
    "llama4_text": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "minicpm3": {"num_key_value_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def all_types() -> list[str]:
    """Return the text types, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """Return a tiny config, or raise what transformers raises."""
    return _tiny(transformers.CONFIG_MAPPING[model_type])


def _tiny(config_class: Any) -> Any:
    known = {field.name for field in dataclasses.fields(config_class)}
    given = {name: size for name, size in SIZES.items() if name in known}
    for name, inner in _inner_classes(config_class).items():
        if name in known and dataclasses.is_dataclass(inner):
            given[name] = json.loads(_tiny(inner).to_json_string(use_diff=False))
    return config_class(**(given | OTHERS.get(config_class.model_type, {})))


def _inner_classes(config_class: Any) -> dict[str, Any]:
    """Return the classes of a config's parts, by field."""
    of_version = (getattr(config_class, name, None) for name in ("sub_configs", PARTS))
    return next((found for found in of_version if found), {})


def write_tiny(folder: Path, config: Any) -> bool:
    """Write random weights next to the config; return False if transformers cannot."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if sum(each.numel() for each in model.parameters()) > MAX_PARAMETERS:
            return False
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # any error of transformers' code
        return False
    for name, parameter in model.named_parameters():
        is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
        parameter.data.normal_(1.0 if is_norm else 0.0, 0.25)
    model.save_pretrained(folder)
    return True


def their_tokens(folder: Path, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return transformers' greedy choice after the prompt and after each of our tokens, in
    float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation=use_exact_attention(),
        experts_implementation="eager",
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen


def our_tokens(folder: Path) -> list[list[int]]:
    """Return quire's greedy tokens after each prompt, in float64 and in chunks of 5 tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 5}
    settings |= {"max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 24, "disable_log_stats": True}
    with LLM(str(folder), dtype="float64", **settings) as llm:
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]


def outcome(model_type: str) -> str:
    """Return a type's result for the page. Raise if it is neither right nor refused."""
    try:
        config = tiny_config(model_type)
    except Exception:  # any error of transformers' checks
        return UNTRIED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(config.to_json_string(use_diff=False))
        try:
            spec = model_spec(folder)
        except (ModelError, ConfigError) as error:
            return _refused(error)
        if spec.implementation == QUIRE and spec.model_type in ENCODERS:
            return POOLS
        if not write_tiny(folder, config):
            return UNTRIED
        try:
            found = our_tokens(folder)
        except (ModelError, ConfigError) as error:
            return _refused(error)
        for prompt, tokens in zip(PROMPTS, found, strict=True):
            wanted = their_tokens(folder, prompt, tokens)
            assert tokens == wanted, f"{model_type}: {tokens} instead of {wanted}"
        return OWN if spec.implementation == QUIRE else THEIRS


def _refused(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "\\|")
    for pattern, same in SAME_REASON:
        text = re.sub(pattern, same, text)
    return text.removesuffix(".")


def section(results: Mapping[str, str]) -> str:
    """Return the section for results by type."""
    by_result: dict[str, list[str]] = {}
    for name in sorted(results):
        by_result.setdefault(results[name], []).append(name)
    own = [each for each in (OWN, POOLS, THEIRS) if each in by_result]
    rows = [*own, *sorted(by_result.keys() - set(own))]
    text = HEAD + INTRO
    for each in rows:
        names = [f"`{name}`" for name in by_result[each]]
        for first in range(0, len(names), TYPES_OF_A_ROW):
            text += f"| {each} | {', '.join(names[first : first + TYPES_OF_A_ROW])} |\n"
    return text


def read_section() -> str:
    """Return the section as it is on the page, or an empty text."""
    found = re.search(re.escape(HEAD) + ".*?(?=" + END + ")", PAGE.read_text("utf-8"), re.DOTALL)
    return found[0] if found else ""


def read_results() -> dict[str, str]:
    """Return the page's results, by type."""
    rows = re.findall(r"^\| (.*) \| (.*) \|$", read_section(), re.MULTILINE)[2:]
    return {name: result for result, types in rows for name in re.findall("`(.*?)`", types)}


def survey(types: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each type with its outcome; a failure begins with FAILS."""
    for model_type in types:
        try:
            yield model_type, outcome(model_type)
        except Exception as error:
            yield model_type, f"FAILS: {type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Try every text type of transformers.")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="the page keeps others")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results, num_failed = read_results(), 0
    for model_type, found in survey(parser.parse_args().types or all_types()):
        print(model_type, found, sep="\t", flush=True)
        num_failed += found.startswith("FAILS")
        results[model_type] = found
    kept = {name: found for name, found in results.items() if name in all_types()}
    text, old = PAGE.read_text("utf-8"), read_section()
    text = text.replace(old, "") if old else text
    PAGE.write_text(text.replace(END, section(kept) + END, 1), "utf-8")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
