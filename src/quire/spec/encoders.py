"""Encoders (BERT and its relatives): models whose tokens attend in both directions. No torch.

Encoders cache nothing: a step computes the whole prompt.

Positions come from a table or from a rotary embedding. RoBERTa's table begins with rows for
padding:

    rows       0 ... pad_token_id | pad_token_id + 1 ...
    positions                     | 0 ...
"""

from quire.base.requests.pooling import CLASSIFY, CLS, MEAN
from quire.spec.config_fields import MAX_COUNT, Fields
from quire.spec.layer_windows import FULL, SLIDING

BERT, MODERNBERT = "bert", "modernbert"
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
ENCODER_TYPES = (BERT, *ROBERTA_TYPES, MODERNBERT)
FULL_EVERY = 3  # every third layer of ModernBERT, from the first on, attends to all tokens
LOCAL_ATTENTION = 128  # tokens visible in ModernBERT's other layers, half of them on each side
MAX_SEGMENTS = 1 << 8


def is_encoder(model_type: str) -> bool:
    """Return whether quire runs models of this type as encoders."""
    return model_type in ENCODER_TYPES


def padding_rows(fields: Fields, model_type: str) -> int:
    """Return the number of rows in the position table before the first token's row."""
    if model_type not in ROBERTA_TYPES:
        return 0
    return fields.integer("pad_token_id", minimum=0, maximum=MAX_COUNT - 1) + 1


def num_segments(fields: Fields) -> int:
    """Return the number of segments (token types) to which tokens may belong."""
    return fields.integer("type_vocab_size", default=2, maximum=MAX_SEGMENTS)


def uses_segments(fields: Fields) -> bool:
    """Return whether the model distinguishes the two texts of a pair by segments.

    RoBERTa does not, whatever the size of its table: all its tokens are in the first segment."""
    return fields.text("model_type", "") == BERT and num_segments(fields) > 1


def encoder_pooling(fields: Fields, task: str) -> str | None:
    """Return an encoder's default pooling, for models without files of sentence-transformers.

    It is CLS, except for classes of ModernBERT, whose config sets it. None for other models."""
    model_type = fields.text("model_type", "")
    if model_type == MODERNBERT and task == CLASSIFY:
        return fields.text("classifier_pooling", CLS)
    return CLS if is_encoder(model_type) else None


def encoder_windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; None for no window. Tokens less than a window apart see each
    other."""
    if model_type != MODERNBERT:
        return (None,) * num_layers
    window = fields.integer("local_attention", default=LOCAL_ATTENTION, maximum=MAX_COUNT) // 2 + 1
    kinds = fields.texts("layer_types")
    if kinds is None:
        every = fields.integer("global_attn_every_n_layers", default=FULL_EVERY)
        kinds = tuple(SLIDING if layer % every else FULL for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise fields.error(
            "layer_types", f"it must name {FULL} or {SLIDING} for each of {num_layers} layers"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def check_encoder(fields: Fields, model_type: str) -> None:
    """Raise ModelError if the config sets an option that quire's encoders lack."""
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise fields.error(name, f"models of type {model_type} are encoders here; set it false")
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.error("position_embedding_type", "only absolute positions are supported")
    if model_type == MODERNBERT:
        if fields.text("classifier_pooling", CLS) not in (CLS, MEAN):
            raise fields.error("classifier_pooling", f"it must be {CLS} or {MEAN}")
    else:
        _ = num_segments(fields)
