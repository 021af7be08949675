"""Small functions and objects that scripts import from vLLM."""

import enum
import gc
import logging
import sys
import uuid


def init_logger(name: str) -> logging.Logger:
    """Return a logger, as `logging.getLogger` does."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """Return 32 random hexadecimal digits, for a request's id."""
    return uuid.uuid4().hex


class Counter:
    """Counts calls of `next`, from `start`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        number, self.counter = self.counter, self.counter + 1
        return number

    def reset(self) -> None:
        self.counter = 0


class UsageContext(enum.Enum):
    """Where an engine runs. quire reports no usage, so it changes nothing."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Platform:
    """The device that torch offers."""

    @property
    def device_type(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False


current_platform = Platform()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect engines that the script has deleted, and return cached memory of the GPU.
    shutdown_ray: ignored, as each engine ends its own processes."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def destroy_model_parallel() -> None:
    """Do nothing: each engine ends its own groups."""


def destroy_distributed_environment() -> None:
    """Do nothing: each engine ends its own groups."""
