"""OpenVINO GenAI's `VLMPipeline`, one image after another. No options.

The pipeline replaces the mark of an image by the tokens of the image and those around it.
"""

from typing import Any

from benchmarks.cpu.drivers.imaging import ImageJob, drive

MARK = "<ov_genai_image_0>"
CACHE_GB = 1


class OpenVINOImages:
    def __init__(self, job: ImageJob) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        self._np, self._openvino, self._text = np, openvino, job.text
        self._config = openvino_genai.GenerationConfig()
        self._config.max_new_tokens = self._config.min_new_tokens = 1
        self._config.ignore_eos = True
        self._config.do_sample = False
        self._config.apply_chat_template = False
        self._prompt_len = job.workload.prompt_len
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = job.workload.prompt_len  # not in pieces of 256
        self._pipeline = openvino_genai.VLMPipeline(
            str(job.model), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=job.threads
        )

    def picture(self, pixels: bytes, side: int) -> Any:
        values = self._np.frombuffer(pixels, self._np.uint8).reshape(1, side, side, 3)
        return self._openvino.Tensor(values)

    def first_texts(self, pictures: list[Any]) -> list[str]:
        return [self._first_text(picture) for picture in pictures]

    def _first_text(self, picture: Any) -> str:
        result = self._pipeline.generate(
            MARK + self._text, images=[picture], generation_config=self._config
        )
        num_tokens = result.perf_metrics.get_num_input_tokens()
        assert num_tokens == self._prompt_len, f"{num_tokens} tokens, not {self._prompt_len}"
        return str(result.texts[0])


if __name__ == "__main__":
    drive(OpenVINOImages)
