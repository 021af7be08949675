"""The least arithmetic of images, and from it the least time that each workload can take.

A multiply-add counts as two operations. Norms, activations, rotations and the text model's sampling
are ignored. Both frames of a patch are equal, so one product of half the size suffices.
"""

from dataclasses import dataclass

from benchmarks.cpu.engines import FLOAT16
from benchmarks.cpu.images.workload import ImageShape, ImageWorkload
from benchmarks.cpu.limits import Bound, Ceilings

CHANNELS = 3


@dataclass(frozen=True)
class TowerWork:
    """The operations of a vision tower for one square image."""

    products: float  # with weights
    attention: float  # of queries, keys and values

    @classmethod
    def of(cls, shape: ImageShape, side: int) -> "TowerWork":
        """Count the operations. side: of the image, in pixels."""
        tower = shape.tower
        num_patches = (side // tower.patch) ** 2
        embedding = CHANNELS * tower.patch**2 * tower.width
        block = 4 * tower.width**2 + 2 * tower.width * tower.inner
        grouped = tower.width * tower.group
        merger = grouped * (grouped + shape.text.hidden)
        num_mergers = 1 + len(tower.deepstack)
        weights = num_patches * (embedding + tower.depth * block)
        weights += num_patches // tower.group * num_mergers * merger
        pairs = num_patches**2 * tower.width * tower.depth
        return cls(2.0 * weights, 4.0 * pairs)

    def lower_bound_s(self, ceilings: Ceilings) -> float:
        """Return the time at the machine's peak of multiply-adds in 16 or 32 bits."""
        return (self.products + self.attention) / ceilings.float_per_s


def min_times(workload: ImageWorkload, ceilings: Ceilings) -> dict[str, float]:
    """Return the limit of the metric of a workload, in the metric's unit."""
    tower_s = TowerWork.of(workload.shape, workload.side).lower_bound_s(ceilings)
    text = Bound(workload.shape.text, FLOAT16, ceilings)
    image_s = tower_s + text.prefill_s(workload.prompt_len, 0, 1)
    if workload.name == "first":
        return {"image_ttft_s": image_s}
    return {"images_rate": 1 / image_s}
