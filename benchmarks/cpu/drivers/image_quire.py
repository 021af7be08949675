"""quire, through `LLM`. All images of a call are given at once. options: its settings."""

from typing import Any

from benchmarks.cpu.drivers.imaging import IMAGE, VISION_END, VISION_START, ImageJob, drive

SPARE_TOKENS = 256  # of a sequence, and of the pool for each


class QuireImages:
    def __init__(self, job: ImageJob) -> None:
        from quire import LLM, SamplingParams

        work = job.workload
        num_tokens = work.prompt_len + SPARE_TOKENS
        num_slots = work.together * (num_tokens + SPARE_TOKENS)
        self._prompt_len = work.prompt_len
        self._params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._prompt = VISION_START + IMAGE + VISION_END + job.text
        self._llm = LLM(
            str(job.model),
            device="cpu",
            max_model_len=num_tokens,
            max_num_seqs=work.together,
            kv_cache_memory_bytes=num_slots * work.shape.text.kv_bytes_per_token,
            disable_log_stats=True,
            **job.options,
        )

    def picture(self, pixels: bytes, side: int) -> Any:
        from PIL import Image

        return Image.frombytes("RGB", (side, side), pixels)

    def first_texts(self, pictures: list[Any]) -> list[str]:
        prompts = [
            {"prompt": self._prompt, "multi_modal_data": {"image": picture}} for picture in pictures
        ]
        outputs: list[Any] = self._llm.generate(prompts, self._params, use_tqdm=False)
        for output in outputs:
            num_tokens = len(output.prompt_token_ids)
            assert num_tokens == self._prompt_len, f"{num_tokens} tokens, not {self._prompt_len}"
        return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    drive(QuireImages)
