"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's layers; positions begin behind the row of padding, and
all tokens are of one segment (base/encoders.py)."""

from quire.models.bert import Bert


class Roberta(Bert):
    """A whole model, up to its tokens' hidden states."""

    base_prefix = "roberta."
