"""The paper's models and machines (P table 1), and its workloads.

Memory for keys and values is the paper's, so all systems have the same. Step times come from the
models' shapes and the A100's data sheet (`quire simulate`). The host of an engine of 2023 adds its
time to each step (`overhead.py`). Orca is the authors' own version inside their engine, so it has
the same host time; FasterTransformer is a C++ engine and has none. Attention through block tables
is slowed down for quire as the paper measured it for its kernels (20 to 26 %, P 7.1). quire's own
kernels were not measured to be slower.

`Assumptions` has all that the texts leave open. Figures can change one assumption at a time.
"""

from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from benchmarks.paper.overhead import EngineTimes, Overhead, overhead
from quire.base.messages import Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.tools.devices import find_gpu
from quire.tools.simulate.arrivals import Arrival
from quire.tools.simulate.roofline import roofline_of
from quire.tools.sizing.fit import Fit, fit
from quire.tools.step_times import Roofline
from quire.tools.workloads import ALPACA, SHAREGPT, Lengths, Workload, token_ids_of

MAX_LEN = 2048
BLOCK_SIZE = 16
MAX_SEQS = 1024
MAX_STEP_TOKENS = 2048
PREFIX_NAME, OWN_NAME = 1, 1 << 20  # of parts of prompts


@dataclass(frozen=True)
class Assumptions:
    """Everything that the texts leave open. None: the derived value of `overhead.py`."""

    step_s: float | None = None  # the host's time in a step
    request_s: float | None = None  # the host's time for each request that samples
    arithmetic: float = 1.0  # rate of products, as times the formula's share of the data sheet
    memory: float = 1.0  # rate of reading, likewise
    paged_attention: float = 1.23  # times as long as over contiguous memory: 20 to 26 % (P 7.1)
    sureness: float = 0.8  # of the candidates of beams: benchmarks/memory/sharing.py
    same_share: float = 0.9  # share of the positions where beams have the same candidates
    launch_s: float = 10e-6  # to submit one copy of the device's memory
    replaced: float | None = None  # share of Orca's beams copied in a step; None is as in quire


DEFAULT = Assumptions()


@dataclass(frozen=True)
class Setting:
    """A model on its machine. num_slots: tokens that the memory for keys and values holds."""

    name: str
    model: str
    device: str
    num_devices: int
    num_slots: int

    @property
    def device_times(self) -> Roofline:
        """Step times of the device alone, over contiguous memory."""
        return _times(self.model, self.device, self.num_devices)

    @property
    def plan(self) -> Fit:
        """quire's plan of the model and its memory on this machine."""
        return _fit(self.model, self.device, self.num_devices)

    @property
    def num_copies(self) -> int:
        """Copies that move a sequence: its keys and its values in each layer."""
        return 2 * self.plan.spec.num_layers

    def times(
        self, is_paged: bool, num_rows: int = 1, assumed: Assumptions = DEFAULT
    ) -> EngineTimes:
        """Return step times with the host's. num_rows: of a request, which are sampled at once."""
        derived = host_times()
        step_s = derived.step_s if assumed.step_s is None else assumed.step_s
        request_s = derived.request_s if assumed.request_s is None else assumed.request_s
        device = self.device_times
        slower = assumed.paged_attention if is_paged else 1.0
        attention = tuple(
            replace(
                each,
                context_s=slower * each.context_s / assumed.memory,
                pair_s=slower * each.pair_s / assumed.arithmetic,
            )
            for each in device.attention
        )
        given = {each.name: getattr(device, each.name) for each in fields(device)}
        given |= {
            "weights_s": device.weights_s / assumed.memory,
            "token_s": device.token_s / assumed.arithmetic,
            "sample_s": device.sample_s / assumed.arithmetic,
            "fixed_s": device.fixed_s + step_s,
            "attention": attention,
        }
        return EngineTimes(**given, row_s=request_s / num_rows)


OPT_13B = Setting("OPT-13B, 1 A100", "shape:opt-13b", "A100-40", 1, 15_700)
OPT_66B = Setting("OPT-66B, 4 A100", "shape:opt-66b", "A100-40", 4, 9_700)
OPT_175B = Setting("OPT-175B, 8 A100-80GB", "shape:opt-175b", "A100-80", 8, 60_100)
LLAMA_13B = Setting("LLaMA-13B, 1 A100", "shape:llama-13b", "A100-40", 1, 15_700)
WORKLOADS = (SHAREGPT, ALPACA)


@cache
def host_times() -> Overhead:
    """Return the host's time in a step."""
    return overhead(OPT_13B.device_times)


@cache
def _times(model: str, device: str, num_devices: int) -> Roofline:
    return roofline_of(_fit(model, device, num_devices))


@cache
def _fit(model: str, device: str, num_devices: int) -> Fit:
    config = config_from_flat(model=model, tensor_parallel_size=num_devices)
    return fit(config, resolve_model(model), find_gpu(device))


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
    is_even: arrivals at equal distances instead.
    """

    workload: Workload
    rate_per_s: float
    seconds: float
    method: Method = Method()
    prefix: int = 0
    seed: int = 0
    is_even: bool = False

    def lengths(self) -> list[tuple[float, int, int]]:
        """Draw arrivals: time, tokens of the prompt without the prefix, tokens of the answer."""
        rng = np.random.default_rng(self.seed)
        num = max(1, rng.poisson(self.rate_per_s * self.seconds))
        at_s = np.sort(rng.uniform(0.0, self.seconds, num))
        if self.is_even:
            at_s = np.arange(num) / self.rate_per_s
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
