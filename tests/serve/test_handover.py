"""Disaggregated prefill: one engine computes a prompt, another one its answer. Every store gives
the same tokens. Only missing blocks move, and lost blocks are recomputed.

Covers `base/settings/cache_config.py`, `base/kv_orders.py`, `base/settings/kv_transfer.py` and
`scheduler/reuse/offers.py`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.base.kv_orders import Fetch, LookUp
from quire.engine.connectors import served
from quire.engine.connectors import worker as worker_file
from quire.engine.connectors.peer_wire import SECRET
from quire.ops.host.native import core
from quire.scheduler.reuse import stores as stores_file
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.views import StoresView
from tests.serve import test_hybrid
from tests.serve.test_same_bits import found, open_llm
from tests.support.cases import slow_but
from tests.support.engine.attachments import stores_of
from tests.support.engine.shared_store import shared_store
from tests.support.engine.store_servers import redis_server, s3_server
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

__all__ = ["redis_server", "s3_server"]  # fixtures
LENGTH, BLOCK = 41, 4
PATIENCE_S = 20.0
FULL = LENGTH // BLOCK  # blocks of a prompt
PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_tokens(*[LENGTH] * 4, seed=3)]
FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
SAMPLED = {"temperature": 0.8, "seed": 1}
GREEDY = {"temperature": 0.0}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16}

Urls = tuple[list[str], list[str]]  # stores of the prefill engine and of the decode engine


def params(transfer: Any = None, **chosen: Any) -> SamplingParams:
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    defaults = {"max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(extra_args=extra, **(defaults | chosen))


def scheduler_of(llm: LLM) -> Scheduler:
    return llm._alive.client.core.scheduler


def view(llm: LLM) -> StoresView:
    stores = scheduler_of(llm).stores
    assert stores is not None
    return stores.view()


def generate(llm: LLM, prompt: Any, *args: Any, **chosen: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], params(*args, **chosen), use_tqdm=False)
    return output


def settled(llm: LLM) -> None:
    """Wait until all blocks are stored, then check that no block is in use."""
    running = llm._alive.client.core
    while stores_of(running).num_open:
        running.wait_for_answers()
    running.scheduler.check_invariants()
    kv = running.scheduler.memory.kv
    assert all(pool.num_used == 0 for pool in (*kv.pools, *kv.host_pools))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the secret with which peers authenticate."""
    monkeypatch.setenv(SECRET, "a secret of these tests")


@pytest.fixture
def shm() -> Iterator[str]:
    with shared_store() as url:
        yield url


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return f"dir:{tmp_path}"


KINDS = ("directory", "shm", "peer", "redis_server", "s3_server")


@pytest.fixture(params=slow_but(KINDS, *KINDS[:-2]))
def urls(request: pytest.FixtureRequest) -> Urls:
    if request.param == "peer":
        return ["serve://127.0.0.1:0"], []
    made = request.getfixturevalue(request.param)
    url = made if isinstance(made, str) else made.url
    return [url], [url]


def open_pair(urls: Urls, **settings: Any) -> tuple[LLM, LLM]:
    first = open_llm("qwen3", kv_store=urls[0], **(SETTINGS | settings))
    stores = urls[1] or [f"peer://127.0.0.1:{port_of(first)}"]
    return first, open_llm("qwen3", kv_store=stores, **(SETTINGS | settings))


def port_of(llm: LLM) -> int:
    connections = stores_of(llm._alive.client.core)
    (worker,) = connections._workers
    assert isinstance(worker, served.ServedBlocks)
    return worker.port


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[Any]]:
    with open_llm("qwen3", enable_prefix_caching=False, **SETTINGS) as llm:
        return {
            name: [found([generate(llm, prompt, **chosen)]) for prompt in PROMPTS]
            for name, chosen in (("sampled", SAMPLED), ("greedy", GREEDY))
        }


def test_decode_engine_continues_a_remote_prompt(urls: Urls, wanted: dict[str, list[Any]]) -> None:
    """Send both legs as a router does. Blocks that the second engine already has do not move."""
    first, second = open_pair(urls)
    with first, second:
        block_bytes = sum(scheduler_of(first).memory.kv.block_bytes)
        for number, prompt in enumerate(PROMPTS):
            kv_params = generate(first, prompt, FIRST_LEG, max_tokens=1).kv_transfer_params
            assert kv_params is not None and kv_params["do_remote_prefill"] is True
            assert kv_params["remote_num_blocks"] == FULL
            kind, chosen = ("greedy", GREEDY) if number % 2 else ("sampled", SAMPLED)
            output = generate(second, prompt, kv_params | {"of_a_router": 1}, **chosen)
            assert found([output]) == wanted[kind][number]
            assert output.num_cached_tokens == FULL * BLOCK
            assert output.prefix is not None and output.prefix.store == FULL * BLOCK
            assert view(second).num_fetched == FULL * (number + 1)
        settled(first)
        assert view(first).num_kept_bytes == view(second).num_fetched_bytes
        assert view(second).num_fetched_bytes == FULL * len(PROMPTS) * block_bytes
        # The second engine has the first half: only the other half moves.
        half = PROMPTS[0]["prompt_token_ids"][: FULL // 2 * BLOCK]
        longer = {"prompt_token_ids": half + PROMPTS[1]["prompt_token_ids"][: LENGTH - len(half)]}
        before, kept = view(second).num_fetched, view(first).num_kept
        kv_params = generate(first, longer, FIRST_LEG, max_tokens=1).kv_transfer_params
        generate(second, longer, kv_params)
        settled(first)
        assert view(second).num_fetched - before == FULL - FULL // 2
        assert view(first).num_kept - kept == FULL - FULL // 2
        settled(first)
        settled(second)


def test_only_marked_requests_are_stored_unless_eager_or_producer(shm: str) -> None:
    with open_llm("qwen3", kv_store=shm, **SETTINGS) as llm:
        assert generate(llm, PROMPTS[0]).kv_transfer_params is None
        settled(llm)
        assert view(llm).num_kept == 0
        # Blocks that an earlier request computed belong to the marked request as well.
        generate(llm, PROMPTS[0], FIRST_LEG, max_tokens=1)
        settled(llm)
        assert view(llm).num_kept == FULL
    for number, settings in enumerate(({"kv_eager": True}, {"kv_transfer_config": PRODUCER}), 1):
        with open_llm("qwen3", kv_store=shm, **SETTINGS, **settings) as llm:
            generate(llm, PROMPTS[number])
            settled(llm)
            assert view(llm).num_kept == (LENGTH + 8 - 1) // BLOCK


PRODUCER = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_size": 1e9}
CONSUMER = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}


def test_consumer_stores_no_blocks(shm: str) -> None:
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1, "kv_transfer_config": CONSUMER}
    with open_llm("qwen3", kv_store=shm, **SETTINGS, **few) as llm:
        for prompt in PROMPTS:
            assert generate(llm, prompt, FIRST_LEG, max_tokens=1).kv_transfer_params is None
        settled(llm)
        assert view(llm).num_kept == 0
    with open_llm("qwen3", kv_store=shm, **SETTINGS) as llm:
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 0, (
            "the consumer stored blocks when it closed"
        )


def test_decode_engine_does_not_wait_for_unavailable_blocks(shm: str) -> None:
    """Parameters of another prompt or another engine: the prompt is recomputed immediately."""
    first, second = open_pair(([shm], [shm]))
    with first, second:
        kv_params = generate(first, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
        assert kv_params is not None
        orders = watched(second)
        foreign = {"do_remote_prefill": True, "remote_block_ids": [3, 4], "remote_host": "x"}
        for prompt, transfer in zip(PROMPTS[1:], (kv_params, foreign), strict=False):
            assert generate(second, prompt, transfer).num_cached_tokens == 0
        assert orders and not any(getattr(order, "wait_s", 0.0) for order in orders)


def test_blocks_are_fetched_while_the_prompt_is_computed(
    shm: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second leg starts first and fetches each block as soon as it is stored. Its tokens are
    the same. The time limits suit a busy machine."""
    monkeypatch.setattr(stores_file, "WAIT_S", PATIENCE_S)
    monkeypatch.setitem(worker_file.WAIT_S, LookUp, 2 * PATIENCE_S)
    first, second = open_pair(([shm], [shm]))
    with first, second:
        client, other = first._alive.client, second._alive.client
        requests = second._alive.requests
        prompt = second._alive.renderer.render(PROMPTS[0])
        other.add(requests.make(prompt, params({"do_remote_prefill": True}, **GREEDY), "late"))
        client.add(first._alive.requests.make(prompt, params(FIRST_LEG, max_tokens=1), "early"))
        counts = []
        until_s = time.monotonic() + PATIENCE_S
        while client.num_unfinished:
            client.step()
            while view(second).num_fetched < (kept := settled_stores(client.core)):
                assert time.monotonic() < until_s, (
                    f"{kept} blocks were stored, but not all were fetched"
                )
                other._outputs.process(other.core.advance(), 0.0)
            counts.append(kept)
        assert counts == [0, 4, FULL], "the blocks of two chunks arrive before the last step ends"
        outputs = []
        while other.num_unfinished:
            outputs = other.step() or outputs
        assert found(outputs) == wanted["greedy"][0]
        assert outputs[0].num_cached_tokens == FULL * BLOCK


@pytest.mark.parametrize("urls", slow_but(KINDS, "peer"), indirect=True)
def test_conversation_moves_through_three_engines(urls: Urls) -> None:
    """Each engine starts from the blocks that the previous one stored, including its answer's."""
    if not urls[1]:
        pytest.skip("a peer has what it computes itself")
    history, alone, got, cached = PROMPTS[0]["prompt_token_ids"][:21], [], [], []
    few = SETTINGS | {"kv_store": urls[0], "kv_eager": True}
    with (
        open_llm("qwen3", enable_prefix_caching=False, **SETTINGS) as one,
        open_llm("qwen3", **few) as a,
        open_llm("qwen3", **few) as b,
        open_llm("qwen3", **few) as c,
    ):
        for number, llm in enumerate((a, b, c, a)):
            prompt = {"prompt_token_ids": history}
            alone.append(found([generate(one, prompt, **SAMPLED)]))
            output = generate(llm, prompt, **SAMPLED)
            settled(llm)
            got.append(found([output]))
            cached.append(output.num_cached_tokens)
            history = [*history, *output.outputs[0].token_ids, 7 + number]
    assert got == alone
    assert cached == [0] + [(21 + 9 * turn - 2) // BLOCK * BLOCK for turn in (1, 2, 3)]


def test_hybrid_model_hands_over_the_last_state_of_a_prompt(shm: str) -> None:
    """Only a prompt's last state is stored; the second engine does not wait for the others."""
    ids = random_tokens(40, seed=9)[0]
    prompt = {"prompt_token_ids": ids}
    with test_hybrid.open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        alone = found([generate(plain, prompt, **SAMPLED)])
    own: dict[str, Any] = {"dtype": "float32", "kv_store": shm, "max_num_batched_tokens": 16}
    with test_hybrid.open_llm(**own) as first, test_hybrid.open_llm(**own) as second:
        kv_params = generate(first, prompt, FIRST_LEG, max_tokens=1).kv_transfer_params
        settled(first)
        orders = watched(second)
        for _ in range(2):  # the second run hits only local blocks
            output = generate(second, prompt, kv_params, **SAMPLED)
            assert found([output]) == alone
            assert output.num_cached_tokens == test_hybrid.END
        assert [type(order) for order in orders] == [LookUp, Fetch]
        settled(second)


def watched(llm: LLM) -> list[Any]:
    """Record the orders that are sent to stores from now on."""
    orders: list[Any] = []
    connections: Any = stores_of(llm._alive.client.core)
    submit = connections.submit
    connections.submit = lambda new: (orders.extend(new), submit(new))
    return orders


def settled_stores(running: Any) -> int:
    while stores_of(running).num_open:
        running.wait_for_answers()
    return int(running.scheduler.stores.num_kept)


@pytest.mark.parametrize("harm", ["flip", "swap", "remove"])
def test_lost_or_damaged_blocks_are_recomputed(
    harm: str, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    first, second = open_pair(([f"dir:{tmp_path}"], [f"dir:{tmp_path}"]))
    with first, second:
        kv_params = generate(first, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
        settled(first)
        files = sorted(path for path in tmp_path.rglob("*.kv"))
        assert len(files) == FULL
        data = [file.read_bytes() for file in files]
        for i, file in enumerate(files):
            if harm == "flip":
                file.write_bytes(data[i][:-1] + bytes([data[i][-1] ^ 1]))
            elif harm == "swap":
                file.write_bytes(data[i - 1])
            elif i % 2:
                file.unlink()
        output = generate(second, PROMPTS[0], kv_params, **SAMPLED)
        assert found([output]) == wanted["sampled"][0]
        settled(second)


def test_blocks_of_another_dtype_or_salt_are_never_used(shm: str) -> None:
    first, _ = open_llm("qwen3", kv_store=shm, **SETTINGS), None
    with first, open_llm("qwen3", kv_store=shm, **(SETTINGS | {"dtype": "bfloat16"})) as second:
        kv_params = generate(first, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
        assert generate(second, PROMPTS[0], kv_params).num_cached_tokens == 0
        salted = PROMPTS[0] | {"cache_salt": "a tenant's"}
        assert generate(first, salted, FIRST_LEG, max_tokens=1).num_cached_tokens == 0


def test_peer_serves_host_memory_and_offers_recomputed_blocks_again() -> None:
    """Serving copies nothing. Host memory fits little more than one prompt, so the next ones evict
    it; once it is recomputed, peers can fetch it again."""
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1}
    few["kv_host_gb"] = pool / 1e9
    with open_llm("qwen3", kv_store="serve://127.0.0.1:0", **SETTINGS, **few) as first:
        for _ in range(2):
            for prompt in PROMPTS:
                kv_params = generate(first, prompt, FIRST_LEG, max_tokens=1).kv_transfer_params
                settled(first)
            peer = f"peer://127.0.0.1:{port_of(first)}"
            with open_llm("qwen3", kv_store=peer, **SETTINGS) as second:
                assert generate(second, PROMPTS[-1], kv_params).num_cached_tokens == FULL * BLOCK
                assert generate(second, PROMPTS[0]).num_cached_tokens == 0
                settled(second)


def test_request_selects_the_peer_by_host_and_port() -> None:
    """An address outside of the settings is never used: every configured peer is queried."""
    served_at = "serve://127.0.0.1:0"
    with (
        open_llm("qwen3", kv_store=served_at, **SETTINGS) as one,
        open_llm("qwen3", kv_store=served_at, **SETTINGS) as two,
    ):
        peers = [f"peer://127.0.0.1:{port_of(llm)}" for llm in (one, two)]
        with open_llm("qwen3", kv_store=peers, **SETTINGS) as second:
            orders = watched(second)
            for number, (llm, prompt) in enumerate(zip((one, two), PROMPTS, strict=False)):
                kv_params = generate(llm, prompt, FIRST_LEG, max_tokens=1).kv_transfer_params
                settled(llm)
                orders.clear()
                named = kv_params | {"remote_host": "127.0.0.1", "remote_port": port_of(llm)}
                assert generate(second, prompt, named).num_cached_tokens == FULL * BLOCK
                assert {order.store for order in orders} == {number}
            kv_params = generate(one, PROMPTS[2], FIRST_LEG, max_tokens=1).kv_transfer_params
            orders.clear()
            named = kv_params | {"remote_host": "198.51.100.1", "remote_port": 80}
            assert generate(second, PROMPTS[2], named).num_cached_tokens == FULL * BLOCK
            assert {order.store for order in orders} == {0, 1}


def test_closed_peer_counts_as_a_miss(wanted: dict[str, Any]) -> None:
    first, second = open_pair((["serve://127.0.0.1:0"], []))
    with second:
        with first:
            kv_params = generate(first, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
            gone = generate(first, PROMPTS[1], FIRST_LEG, max_tokens=1).kv_transfer_params
            output = generate(second, PROMPTS[0], kv_params, **GREEDY)
            assert output.num_cached_tokens == FULL * BLOCK
        output = generate(second, PROMPTS[1], gone, **GREEDY)
        assert found([output]) == wanted["greedy"][1]
        assert output.num_cached_tokens == 0
        settled(second)


def test_samples_share_a_remote_prompt_and_cancelled_requests_leak_nothing(shm: str) -> None:
    several = {"n": 3, "temperature": 0.9, "seed": 4}
    with open_llm("qwen3", enable_prefix_caching=False, **SETTINGS) as llm:
        alone = [each.token_ids for each in generate(llm, PROMPTS[2], **several).outputs]
    first, second = open_pair(([shm], [shm]), max_num_batched_tokens=7)
    with first, second:
        kv_params = generate(first, PROMPTS[2], FIRST_LEG, max_tokens=1).kv_transfer_params
        output = generate(second, PROMPTS[2], kv_params, **several)
        assert [each.token_ids for each in output.outputs] == alone
        assert output.num_cached_tokens == FULL * BLOCK
        for llm, transfer in ((first, FIRST_LEG), (second, {"do_remote_prefill": True})):
            client = llm._alive.client
            prompt = llm._alive.renderer.render(PROMPTS[3])
            for num_steps in range(4):
                name = f"cancelled {num_steps}"
                client.add(llm._alive.requests.make(prompt, params(transfer), name))
                for _ in range(num_steps):
                    client.step()
                client.abort([name])
                client.core.settle()
            settled(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_transfer_config": CONSUMER}, "needs a store that both engines reach"),
        ({"kv_transfer_config": {"kv_role": "boss"}}, "kv_role .* must be one of kv_producer"),
        ({"kv_transfer_config": {"kv_connector": "Unknown"}}, "is not supported: quire moves"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "--kv-host-gb"),
        ({"kv_transfer_config": {"kv_connector": "SharedStorageConnector"}}, "shared_storage_path"),
        ({"kv_transfer_config": "{"}, "kv_transfer_config must be JSON"),
        ({"kv_eager": True}, "kv_eager needs a store"),
        (
            {"kv_store": "shm:x", "kv_eager": True, "kv_transfer_config": CONSUMER},
            "writes none",
        ),
        ({"kv_store": "shm:../x"}, "takes a name of letters"),
        ({"kv_store": "peer://10.1.2.3:7400"}, "Set the environment variable QUIRE_KV_SECRET"),
        ({"kv_store": "serve://localhost:0"}, "Set the environment variable QUIRE_KV_SECRET"),
        ({"kv_store": "peer://nowhere"}, "takes HOST:PORT"),
    ],
)
def test_invalid_settings_are_rejected_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv(SECRET, "a secret" if "nowhere" in str(settings) else "")
    with pytest.raises(ConfigError, match=message):
        open_llm("qwen3", **settings)


def test_vllm_directory_connectors_map_to_a_dir_store(tmp_path: Path) -> None:
    extra = {"shared_storage_path": str(tmp_path)}
    given = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    given |= {"kv_connector_extra_config": extra}  # type: ignore[dict-item]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several |= {"kv_connector_extra_config": {"connectors": [given]}}  # type: ignore[dict-item]
    for config in (given, several):
        with open_llm("qwen3", kv_transfer_config=config, **SETTINGS) as llm:
            assert llm._alive.config.cache.stores == [f"dir:{tmp_path}"]


def test_invalid_kv_transfer_params_are_rejected() -> None:
    with open_llm("qwen3") as llm:
        for odd in ({"do_remote_decode": "yes"}, [1], {str(i): 0 for i in range(99)}):
            with pytest.raises(RequestError, match="kv_transfer_params"):
                generate(llm, PROMPTS[0], odd)
        assert generate(llm, PROMPTS[0], {"do_remote_decode": False, "x": 1}).outputs
