"""The scheduler's state machines with groups that need the tokens of one chunk, and with latent
vectors, alone and together with other groups."""

import pytest

from quire.spec.cache_group import CacheGroup
from tests.scheduler.test_scheduler_machine import FULL, SchedulerMachine, StoresMachine
from tests.support.cases import slow_but
from tests.support.scheduler.state_machines import FEW, run_machine

CHUNKS = CacheGroup("chunked", (1,), 1, 8, window=7)
LATENTS = CacheGroup("latent", (3,), 1, 8)


class ChunkedMachine(SchedulerMachine):
    groups = (CHUNKS,)


class MixedChunkedMachine(SchedulerMachine):
    groups = (FULL, CHUNKS)


class ChunkedStoresMachine(StoresMachine):
    groups = (FULL, CHUNKS)


class LatentMachine(SchedulerMachine):
    groups = (LATENTS,)


class LatentStoresMachine(StoresMachine):
    groups = (LATENTS, CHUNKS)


@FEW
@pytest.mark.parametrize(
    "machine",
    slow_but(
        (
            ChunkedMachine,
            MixedChunkedMachine,
            ChunkedStoresMachine,
            LatentMachine,
            LatentStoresMachine,
        ),
        MixedChunkedMachine,
        ChunkedStoresMachine,
        LatentStoresMachine,
    ),
)
def test_chunks_and_latent_vectors_change_no_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)
