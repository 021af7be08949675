"""The paper's models and machines (P table 1), and its workloads.

Memory for keys and values is the paper's, so all systems have the same. Step times come from the
models' shapes and the A100's data sheet (`quire simulate`). All systems add the same overhead per
step, as engines of 2023 had it. The paper gives no step times, but they follow from its figures.
With 2 arrivals a second and 30.4 requests at once, answers have 338 tokens on average (P fig. 13 a,
fig. 11). That is 45 ms per token; the formula has 26 to 27 ms for such a step. Attention through
block tables is slowed down for quire as the paper measured it for its kernels (20 to 26 %, P 7.1).
quire's own kernels were not measured to be slower.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from quire.base.messages import Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.tools.devices import find_gpu
from quire.tools.simulate.arrivals import Arrival
from quire.tools.simulate.roofline import roofline_of
from quire.tools.sizing.fit import fit
from quire.tools.step_times import Roofline
from quire.tools.workloads import ALPACA, SHAREGPT, Lengths, Workload, token_ids_of

MAX_LEN = 2048
BLOCK_SIZE = 16
MAX_SEQS = 1024
MAX_STEP_TOKENS = 2048
ENGINE_S = 0.018  # of each step, in addition to the formula: see above
PAGED_ATTENTION = 1.23  # times as long as over contiguous memory: the middle of 20 to 26 %
PREFIX_NAME, OWN_NAME = 1, 1 << 20  # of parts of prompts


@dataclass(frozen=True)
class Setting:
    """A model on its machine. num_slots: tokens that the memory for keys and values holds."""

    name: str
    model: str
    device: str
    num_devices: int
    num_slots: int

    @property
    def contiguous(self) -> Roofline:
        """Step times over contiguous memory."""
        times = _times(self.model, self.device, self.num_devices)
        return replace(times, fixed_s=times.fixed_s + ENGINE_S)

    @property
    def paged(self) -> Roofline:
        """Step times over block tables."""
        times = self.contiguous
        slower = tuple(
            replace(
                each,
                context_s=PAGED_ATTENTION * each.context_s,
                pair_s=PAGED_ATTENTION * each.pair_s,
            )
            for each in times.attention
        )
        return replace(times, attention=slower)


OPT_13B = Setting("OPT-13B, 1 A100", "shape:opt-13b", "A100-40", 1, 15_700)
OPT_66B = Setting("OPT-66B, 4 A100", "shape:opt-66b", "A100-40", 4, 9_700)
OPT_175B = Setting("OPT-175B, 8 A100-80GB", "shape:opt-175b", "A100-80", 8, 60_100)
LLAMA_13B = Setting("LLaMA-13B, 1 A100", "shape:llama-13b", "A100-40", 1, 15_700)
WORKLOADS = (SHAREGPT, ALPACA)


@cache
def _times(model: str, device: str, num_devices: int) -> Roofline:
    config = config_from_flat(model=model, tensor_parallel_size=num_devices)
    return roofline_of(fit(config, resolve_model(model), find_gpu(device)))


@dataclass(frozen=True)
class Method:
    """How a request's tokens are chosen. num: samples of one prompt, or beams."""

    name: str = "one sample"
    num: int = 1
    is_beams: bool = False


def paper_request(
    request_id: str, prompt_token_ids: list[int], num_output: int, method: Method
) -> Request:
    """Make a request whose sequences all have num_output tokens."""
    params = SamplingParams(
        n=method.num,
        temperature=0.0 if method.num == 1 else 1.0,
        use_beam_search=method.is_beams,
        max_tokens=num_output,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return Request(request_id, prompt_token_ids, params, seed=0)


@dataclass(frozen=True)
class Load:
    """A workload's lengths at a rate of Poisson arrivals, for so many seconds.

    prefix: tokens with which all prompts begin, in addition to the workload's own.
    """

    workload: Workload
    rate_per_s: float
    seconds: float
    method: Method = Method()
    prefix: int = 0
    seed: int = 0

    def lengths(self) -> list[tuple[float, int, int]]:
        """Draw arrivals: time, tokens of the prompt without the prefix, tokens of the answer."""
        rng = np.random.default_rng(self.seed)
        num = max(1, rng.poisson(self.rate_per_s * self.seconds))
        at_s = np.sort(rng.uniform(0.0, self.seconds, num))
        inputs, outputs = self.workload.sample(num, self.seed + 1)
        outputs = np.minimum(outputs, MAX_LEN - self.prefix - inputs)
        return list(zip(at_s.tolist(), inputs.tolist(), outputs.tolist(), strict=True))

    def arrivals(self) -> list[Arrival]:
        """Make the requests, in the order of their arrival."""
        found = []
        for number, (at_s, num_prompt, num_output) in enumerate(self.lengths()):
            parts = [(OWN_NAME + number, num_prompt)]
            if self.prefix:
                parts.insert(0, (PREFIX_NAME, self.prefix))
            tokens = token_ids_of(parts, 1 << 16)
            request = paper_request(str(number), tokens, num_output, self.method)
            found.append(Arrival(at_s, request, num_output))
        return found


# WMT16 English to German (P 6.4). The paper does not give its lengths: these are ours, about 26
# words of source and the same of translation in LLaMA's tokens.
TRANSLATION = Workload("WMT16-like", Lengths(39.0, 0.6, 4, 256), Lengths(45.0, 0.6, 4, 256))
