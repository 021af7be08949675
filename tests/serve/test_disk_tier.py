"""Blocks in a directory return as prefix hits, also after a restart. Damaged files never change a
request's bits."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.cache_config import CacheConfig
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics
from quire.ops.host.native import core
from tests.serve.test_host_tier import PARAMS, PROMPTS
from tests.serve.test_same_bits import Found, found, open_llm
from tests.support.cases import slow_but
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)


def run(directory: Path | None, prompts: list[Any], **settings: Any) -> tuple[Found, list[int]]:
    """Run the prompts one by one in a new engine; return the outputs and the cached tokens."""
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1, "dtype": "float32"}
    if directory is not None:
        few["kv_disk_dir"] = str(directory)
    outputs = []
    with open_llm("qwen3", **(few | settings)) as llm:
        for prompt in prompts:
            outputs += llm.generate([prompt], PARAMS, use_tqdm=False)
    return found(outputs), [output.num_cached_tokens or 0 for output in outputs]


@pytest.fixture(scope="module")
def wanted() -> Found:
    return run(None, PROMPTS, enable_prefix_caching=False)[0]


def files_of(directory: Path) -> Iterator[Path]:
    """Yield the files of blocks, without the lock file."""
    return directory.rglob("*.kv")


def test_another_engine_hits_stored_blocks(tmp_path: Path, wanted: Found) -> None:
    assert run(tmp_path, PROMPTS) == (wanted, [0] * len(PROMPTS))
    assert run(tmp_path, PROMPTS) == (wanted, [36] * len(PROMPTS))
    # Without host memory and in a small pool: evicted blocks return from the directory.
    assert run(tmp_path, PROMPTS * 2, kv_host_gb=0.0) == (wanted * 2, [36] * 2 * len(PROMPTS))


def test_other_salts_and_weights_miss_the_directory(tmp_path: Path) -> None:
    run(tmp_path, PROMPTS[:1])
    salted = PROMPTS[0] | {"cache_salt": "somebody else's"}
    assert run(tmp_path, [salted])[1] == [0]
    assert run(tmp_path, PROMPTS[:1], kv_cache_dtype="int8", dtype="bfloat16")[1] == [0]
    other = {"load_format": "dummy", "seed": 5}
    assert run(tmp_path, PROMPTS[:1], **other)[1] == [0]
    assert run(tmp_path, PROMPTS[:1], **other)[1] == [36]


def test_another_hash_algorithm_misses_the_directory(tmp_path: Path, wanted: Found) -> None:
    run(tmp_path, PROMPTS[:1])
    hashed = {"prefix_caching_hash_algo": "blake2b"}
    assert run(tmp_path, PROMPTS[:1], **hashed) == (wanted[:1], [0])
    assert run(tmp_path, PROMPTS[:1], **hashed)[1] == [36]
    assert run(tmp_path, PROMPTS[:1], prefix_caching_hash_algo="sha256_cbor")[1] == [36]


@pytest.mark.parametrize(
    "harm", slow_but(("flip", "cut", "empty", "swap", "remove"), "flip", "swap")
)
def test_damaged_files_are_misses(harm: str, tmp_path: Path, wanted: Found) -> None:
    numbers = random.Random(1)
    run(tmp_path, PROMPTS)
    files = sorted(files_of(tmp_path))
    assert len(files) > 40
    contents = [file.read_bytes() for file in files]
    for i, file in enumerate(files):
        data = bytearray(contents[i])
        if harm == "flip":
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        elif harm == "cut":
            del data[numbers.randrange(len(data)) :]
        elif harm == "empty":
            data = bytearray()
        elif harm == "swap":
            data = bytearray(contents[i - 1])
        file.unlink() if harm == "remove" else file.write_bytes(bytes(data))
    assert run(tmp_path, PROMPTS) == (wanted, [0] * len(PROMPTS))


def test_reset_keeps_the_directory_for_other_engines(tmp_path: Path, wanted: Found) -> None:
    """After a reset, this engine hits only blocks that it stored later."""
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1, "dtype": "float32"}
    few |= {"kv_disk_dir": str(tmp_path), "kv_host_gb": 0.0}
    run(tmp_path, PROMPTS)
    before = {file: file.read_bytes() for file in files_of(tmp_path)}
    with open_llm("qwen3", **few) as llm:
        for cached in (36, 0, 36):
            if cached == 0:
                llm.reset_prefix_cache()
            outputs = []
            for prompt in PROMPTS:
                outputs += llm.generate([prompt], PARAMS, use_tqdm=False)
            assert [output.num_cached_tokens for output in outputs] == [cached] * len(PROMPTS)
            assert found(outputs) == wanted
    after = {file: file.read_bytes() for file in files_of(tmp_path)}
    assert after.items() > before.items()
    assert run(tmp_path, PROMPTS) == (wanted, [36] * len(PROMPTS))


def test_concurrent_requests_fetch_a_prefix_once(tmp_path: Path) -> None:
    (prompt,) = (prompt["prompt_token_ids"] for prompt in PROMPTS[:1])
    prompts = [{"prompt_token_ids": prompt + [i]} for i in range(5)]
    together: dict[str, Any] = {"dtype": "float32", "kv_disk_dir": str(tmp_path)}
    with open_llm("qwen3", **together) as llm:
        expected = found(llm.generate(prompts, PARAMS, use_tqdm=False))
    with open_llm("qwen3", **together) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        scheduler = llm.engine.client.core.scheduler
        stores = scheduler.stores
        assert stores is not None
        assert (stores.num_fetched, stores.num_kept) == (10, 0)
        metrics = EngineMetrics(scheduler.rows.table.num_rows, 64, counts_hits=True)
        text = Exposition(metrics, scheduler.view, "tiny", CacheConfig()).text()
    for name, number in (("fetched", 10), ("loaded", 10), ("kept", 0), ("offloaded", 0)):
        assert re.search(rf"quire:kv_blocks_{name}_total{{[^}}]*}} {number}.0", text), name
    assert found(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == [40] * 5


def test_impossible_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no effect without prefix caching"):
        run(tmp_path, [], enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="reference does not share its blocks"):
        run(tmp_path, [], attention_backend="reference")
    with pytest.raises(ConfigError, match="there is no KV store 'nowhere'"):
        run(None, [], kv_store="nowhere:there")
