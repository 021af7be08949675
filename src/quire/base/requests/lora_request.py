"""An adapter for a request from Python, under vLLM's names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter (LoRA) of the model: a directory that PEFT wrote, or a GGUF file.

        llm.generate(prompts, params, lora_request=LoRARequest("sql", 1, "adapters/sql"))

    The adapter is identified by its files: equal files share cached blocks, whatever their name.

    lora_name: for messages. lora_int_id: a number above 0, which vLLM needs; it has no effect.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be above 0, got {self.lora_int_id}.")
        if not self.lora_path:
            raise ValueError("lora_path must be an adapter's directory or GGUF file; it is empty.")
