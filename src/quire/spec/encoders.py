"""Models whose tokens see each other in both directions, as their configs say it (BERT and its
kin). They keep nothing of a sequence: a prompt is computed whole, in one step. No torch.

All positions that a token may stand at are in a table, or in a rotation. RoBERTa's table begins
with rows that stand for padding:

    rows       0 ... pad_token_id | pad_token_id + 1 ...
    positions                     | 0 ...
"""

from quire.base.requests.pooling import CLASSIFY, CLS, MEAN
from quire.spec.config_fields import MAX_COUNT, Fields
from quire.spec.layer_windows import FULL, SLIDING

BERT, MODERNBERT = "bert", "modernbert"
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
ENCODER_TYPES = (BERT, *ROBERTA_TYPES, MODERNBERT)
FULL_EVERY = 3  # of ModernBERT's layers the first and every third attend to all tokens
LOCAL_ATTENTION = 128  # tokens that its others see, half of them on each side
MAX_SEGMENTS = 1 << 8


def is_encoder(model_type: str) -> bool:
    """Tell whether models of a type are encoders of ours."""
    return model_type in ENCODER_TYPES


def padding_rows(fields: Fields, model_type: str) -> int:
    """Count the rows of the table of positions before that of the first token."""
    if model_type not in ROBERTA_TYPES:
        return 0
    return fields.integer("pad_token_id", least=0, most=MAX_COUNT - 1) + 1


def num_segments(fields: Fields) -> int:
    """Count the kinds of text that tokens may belong to (segments, token types)."""
    return fields.integer("type_vocab_size", default=2, most=MAX_SEGMENTS)


def tells_segments(fields: Fields) -> bool:
    """Tell whether a model is told which of two texts a token belongs to. RoBERTa's are not,
    whatever the size of the table: all their tokens are of the first."""
    return fields.text("model_type", "") == BERT and num_segments(fields) > 1


def encoder_pooling(fields: Fields, task: str) -> str | None:
    """Return what an encoder pools where no file of sentence-transformers says it: the first token;
    but classes of ModernBERT as its config says. None for other models."""
    model_type = fields.text("model_type", "")
    if model_type == MODERNBERT and task == CLASSIFY:
        return fields.text("classifier_pooling", CLS)
    return CLS if is_encoder(model_type) else None


def encoder_windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, whose tokens see what is less than so far away; None for
    all."""
    if model_type != MODERNBERT:
        return (None,) * num_layers
    window = fields.integer("local_attention", default=LOCAL_ATTENTION, most=MAX_COUNT) // 2 + 1
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
    """Raise ModelError for what a config says that no encoder here is."""
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
