"""transformers' `generate`, one image after another. options: dtype.

The prompt is expanded here: its own processor wants torchvision for videos.
"""

from typing import Any

from benchmarks.cpu.drivers.imaging import IMAGE, VISION_END, VISION_START, ImageJob, drive


class TransformersImages:
    def __init__(self, job: ImageJob) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        torch.set_num_threads(job.threads)
        self._prompt_len = job.workload.prompt_len
        self._torch, self._text, self._merge = torch, job.text, job.workload.shape.tower.merge
        dtype = getattr(torch, job.options["dtype"])
        model = Qwen3VLForConditionalGeneration.from_pretrained(job.model, dtype=dtype)
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._tokenizer = AutoTokenizer.from_pretrained(job.model)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(job.model)

    def picture(self, pixels: bytes, side: int) -> Any:
        from PIL import Image

        return Image.frombytes("RGB", (side, side), pixels)

    def first_texts(self, pictures: list[Any]) -> list[str]:
        return [self._first_text(picture) for picture in pictures]

    def _first_text(self, picture: Any) -> str:
        torch = self._torch
        image = self._processor(images=[picture], return_tensors="pt")
        num_tokens = int(image["image_grid_thw"].prod()) // self._merge**2
        prompt = VISION_START + IMAGE * num_tokens + VISION_END + self._text
        ids = self._tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert ids.shape[1] == self._prompt_len, f"{ids.shape[1]} tokens, not {self._prompt_len}"
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == self._model.config.image_token_id).long(),
                pixel_values=image["pixel_values"],
                image_grid_thw=image["image_grid_thw"],
                max_new_tokens=1,
                do_sample=False,
            )
        return str(self._tokenizer.decode(output[0, -1:]))


if __name__ == "__main__":
    drive(TransformersImages)
