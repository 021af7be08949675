"""The text part of a model that also sees, under a head, where transformers has no class of both.

transformers writes text with such a model by the class of the whole, whose parts are a text model
(Qwen2VLTextModel), a vision model, and a plain linear head. The class made here leaves the vision
model out. The rotary embedding takes three positions for each token (of time, height and width).
For text all three are the token's place in the sequence, so it is the usual rotary embedding.
"""

from typing import Any

from torch import nn

# Text parts on which the class of the whole puts a plain linear head and nothing else, and the type
# of the whole, by which transformers finds how checkpoints store experts.
PLAIN_HEADS = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "glm4v_text": "glm4v",
    "glm4v_moe_text": "glm4v_moe",
    "glm_ocr_text": "glm_ocr",
}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def with_head(config: Any) -> Any | None:
    """Return the class of a text part and its head; None for a type that is not one of these.
    config: transformers' of the text part."""
    if config.model_type not in PLAIN_HEADS:
        return None
    from transformers import MODEL_MAPPING
    from transformers.modeling_outputs import CausalLMOutput

    text_class: Any = MODEL_MAPPING[type(config)]
    around: Any = text_class.__base__  # which knows how its modules begin

    class TextModel(around):  # type: ignore[misc]
        _tied_weights_keys = {HEAD: TABLE}  # noqa: RUF012 (as transformers has it)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **inputs: Any) -> Any:
            return CausalLMOutput(logits=self.lm_head(self.model(**inputs)[0]))

    TextModel.__name__ = text_class.__name__
    return TextModel
