"""Find out which layers of a model have a window or chunks, and which have linear attention.

The rules are transformers'. Each architecture has its own rule, and ignores fields that others use.
A config with fields that contradict its architecture's rule is rejected, because its authors must
have meant something else.
"""

from quire.spec.config_fields import MAX_COUNT, Fields
from quire.spec.deepseek.latent_attention import LATENT_TYPES
from quire.spec.linear_attention import HYBRID_TYPES, LINEAR

Windows = tuple[int | None, ...]

FULL, SLIDING, IN_CHUNKS = "full_attention", "sliding_attention", "chunked_attention"
ATTENDING = (FULL, SLIDING)
OLD_NAMES = {"attention": FULL}
PLAIN = ("llama", "gpt2", "opt", "olmo2", "granite", "glm4", "glm4_moe", "gpt_neox")
WITHOUT = (*PLAIN, *HYBRID_TYPES, *LATENT_TYPES)
EVERYWHERE = ("mistral", "mixtral", "phi3")
BY_LAYER = ("qwen2", "qwen3", "qwen2_moe", "smollm3")
# One layer of every few attends to all tokens, the last of them, unless `layer_types` is set.
IN_TURN = ("gemma2", "gemma3_text", "cohere2", "gpt_oss")
EVERY_OTHER = 2
WITH_PATTERN = ("gemma3_text", "cohere2")  # the config sets the interval of these types
CHUNKED_TYPES = ("llama4_text",)  # types whose windows are chunks of the sequence
# Interval of layers with softmax attention in models with linear attention, unless configured.
FULL_INTERVAL = 4


def layer_windows(fields: Fields, model_type: str, num_layers: int) -> Windows:
    """Return the window of each layer, for types in CHUNKED_TYPES the length of its chunks. None
    for a layer that attends to all earlier tokens.

    Raises ModelError."""
    if model_type in CHUNKED_TYPES:
        return _chunks(fields, num_layers)
    if model_type in WITHOUT:
        windows = _without(fields, model_type, num_layers)
    elif model_type in EVERYWHERE:
        windows = _everywhere(fields, model_type, num_layers)
    elif model_type == "qwen3_moe":
        windows = (_switched_window(fields),) * num_layers
    elif model_type in BY_LAYER:
        return _by_layer(fields, model_type, num_layers)
    elif model_type in IN_TURN:
        return _in_turn(fields, model_type, num_layers)
    else:
        return _of_others(fields, num_layers)
    known = (FULL, LINEAR) if model_type in HYBRID_TYPES else ATTENDING
    kinds = _kinds(fields, num_layers, known=known)
    for layer, (kind, window) in enumerate(zip(kinds or (), windows, strict=False)):
        if (kind == SLIDING) != (window is not None):
            raise fields.error(
                "layer_types",
                f"layer {layer} is {kind}, but {model_type} has"
                f" {f'a window of {window}' if window else 'no windows'} in all layers",
            )
    return windows


def linear_layers(fields: Fields, model_type: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers with linear attention, which have neither a window nor keys and values.

    Raises ModelError if no layer has softmax attention."""
    if model_type not in HYBRID_TYPES:
        return ()
    kinds = _kinds(fields, num_layers, known=(FULL, LINEAR))
    every = fields.integer("full_attention_interval", default=FULL_INTERVAL)
    if kinds is None:
        kinds = tuple(LINEAR if (layer + 1) % every else FULL for layer in range(num_layers))
    if FULL not in kinds:
        name, other = "layer_types", "full_attention_interval"
        if not fields.has(name):
            name, other = other, name
        raise fields.error(
            name, f"none of {num_layers} layers (num_hidden_layers) uses that or {other}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def _without(fields: Fields, model_type: str, num_layers: int) -> Windows:
    if fields.has("sliding_window") and fields.flag("use_sliding_window", True):
        raise fields.error(
            "sliding_window",
            f"{model_type} has no windows; if this is a Mistral, its model_type is mistral, else"
            " set it to null, as transformers ignores it",
        )
    return (None,) * num_layers


def _everywhere(fields: Fields, model_type: str, num_layers: int) -> Windows:
    """Return one window for all layers, or none if `sliding_window` is null."""
    if not fields.has("sliding_window"):
        return (None,) * num_layers
    window = _window(fields)
    if not fields.flag("use_sliding_window", True):
        raise fields.error(
            "use_sliding_window",
            f"{model_type} does not read it, and sliding_window is {window}; set that to null",
        )
    return (window,) * num_layers


def _switched_window(fields: Fields) -> int | None:
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return None
    return _window(fields)


def _by_layer(fields: Fields, model_type: str, num_layers: int) -> Windows:
    window, kinds = _switched_window(fields), _kinds(fields, num_layers)
    if kinds is None:
        has_window = _windowed_layers(fields, model_type, num_layers)
        return tuple(window if has_window[layer] else None for layer in range(num_layers))
    if SLIDING in kinds and window is None:
        raise fields.error(
            "layer_types",
            "sliding_attention needs a sliding_window, and use_sliding_window true",
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _windowed_layers(fields: Fields, model_type: str, num_layers: int) -> list[bool]:
    """Return for each layer whether it has the window, for configs without `layer_types`."""
    if model_type == "smollm3":
        return [not turns for turns in rotated_layers(fields, num_layers)]
    first = fields.integer("max_window_layers", default=num_layers, minimum=0)
    if model_type == "qwen2_moe":
        return [layer % 2 == 0 and layer < first for layer in range(num_layers)]
    return [layer >= first for layer in range(num_layers)]


def _chunks(fields: Fields, num_layers: int) -> Windows:
    """Return the chunks of Llama 4's layers. Without `layer_types`, layers that rotate queries and
    keys have chunks."""
    kinds, name = _kinds(fields, num_layers, known=(FULL, IN_CHUNKS)), "attention_chunk_size"
    size = fields.integer(name, maximum=MAX_COUNT) if fields.has(name) else None
    if kinds is None:
        rotated = rotated_layers(fields, num_layers)
        return tuple(size if turns else None for turns in rotated)
    if IN_CHUNKS in kinds and size is None:
        raise fields.error("layer_types", f"{IN_CHUNKS} needs {name}")
    return tuple(size if kind == IN_CHUNKS else None for kind in kinds)


def rotated_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return for each layer of SmolLM3 or Llama 4 whether it rotates queries and keys.

    `no_rope_layers` holds a 1 for each layer that rotates. Without it, each layer does except every
    `no_rope_layer_interval`-th."""
    if fields.value("no_rope_layers"):
        found = fields.integers("no_rope_layers", maximum=1)
        if len(found) < num_layers:
            raise fields.error(
                "no_rope_layers", f"it has {len(found)} of {num_layers} layers (num_hidden_layers)"
            )
        return [turns == 1 for turns in found[:num_layers]]
    every = fields.integer("no_rope_layer_interval")
    return [(layer + 1) % every != 0 for layer in range(num_layers)]


def _in_turn(fields: Fields, model_type: str, num_layers: int) -> Windows:
    """Return the window for all layers except every n-th, which attends to all tokens."""
    kinds = _kinds(fields, num_layers)
    if kinds is None:
        has_pattern = model_type in WITH_PATTERN
        every = fields.integer("sliding_window_pattern") if has_pattern else EVERY_OTHER
        kinds = tuple(SLIDING if (i + 1) % every else FULL for i in range(num_layers))
    window = _window(fields) if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _of_others(fields: Fields, num_layers: int) -> Windows:
    """Return the windows of a model from another package, from `layer_types` or the first layer."""
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", True):
        return (None,) * num_layers
    window, kinds = _window(fields), _kinds(fields, num_layers, FULL)
    if kinds is not None:
        return tuple(window if kind == SLIDING else None for kind in kinds)
    first = fields.integer("max_window_layers", default=num_layers, minimum=0)
    return tuple(None if layer < first else window for layer in range(num_layers))


def _window(fields: Fields) -> int:
    return fields.integer("sliding_window", maximum=MAX_COUNT)


def _kinds(
    fields: Fields, num_layers: int, others: str = "", known: tuple[str, str] = ATTENDING
) -> tuple[str, ...] | None:
    """Return the layers' kinds; None without `layer_types`. `others` replaces unknown kinds; if it
    is empty, they are an error."""
    found = fields.texts("layer_types")
    if found is None:
        return None
    if len(found) != num_layers:
        raise fields.error(
            "layer_types", f"it names {len(found)} of {num_layers} layers (num_hidden_layers)"
        )
    kinds = []
    for kind in (OLD_NAMES.get(name, name) for name in found):
        if kind not in known and not others:
            raise fields.error(
                "layer_types", f"{kind!r} is not supported; supported are {' and '.join(known)}"
            )
        kinds.append(kind if kind in known else others)
    return tuple(kinds)
