"""Prompt handover in requests and settings, with vLLM's names."""

from typing import Any

import pytest

from quire.base.errors import ConfigError, RequestError
from quire.base.settings.kv_transfer import (
    BOTH,
    CONSUMER,
    HandedOver,
    KVTransfer,
    answer_params,
    parse_transfer,
    transfer_of,
)

DIGEST = bytes(range(32))


def test_params_of_an_answer_are_read_from_the_next_request() -> None:
    given = answer_params(HandedOver(7, DIGEST))
    assert transfer_of(given) == KVTransfer(waits=True, num_blocks=7, digest=DIGEST)
    assert transfer_of(answer_params(HandedOver(0, b""))) == KVTransfer(waits=True)


@pytest.mark.parametrize(
    ("host", "port", "peer"),
    [
        ("prefill-0", 7400, "prefill-0:7400"),
        ("prefill-0", "7400", "prefill-0:7400"),
        ("", 7400, ""), (None, None, ""), ("h", None, ""), ("h", -1, ""), ("h", "x", ""),
        (["h"], 1, ""), ("h" * 254, 1, ""), ("h", 10**6, ""),
    ],
)  # fmt: skip
def test_remote_host_and_port_name_the_peer(host: Any, port: Any, peer: str) -> None:
    given = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
    assert transfer_of(given) == KVTransfer(waits=True, peer=peer)


def test_params_of_an_answer_name_the_host_of_its_blocks() -> None:
    given = answer_params(HandedOver(7, DIGEST, "10.0.0.1:7400"))
    assert (given["remote_host"], given["remote_port"]) == ("10.0.0.1", 7400)
    found = transfer_of(given)
    assert found is not None and found.peer == "10.0.0.1:7400"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False, "do_remote_prefill": None, "x": 3}, None),
        ({"do_remote_decode": True, "remote_host": "h", "tp_size": 4}, KVTransfer(keeps=True)),
        ({"do_remote_prefill": True}, KVTransfer(waits=True)),
        ({"do_remote_prefill": True, "remote_block_ids": []}, KVTransfer(waits=True)),
        # From other engines: these blocks never arrive.
        ({"do_remote_prefill": True, "remote_block_ids": [1, 2, 3]}, None),
        ({"do_remote_prefill": True, "remote_block_ids": ["xy"], "remote_num_blocks": 1}, None),
        ({"do_remote_prefill": True, "remote_block_ids": ["00"], "remote_num_blocks": 1}, None),
        (answer_params(HandedOver(1, DIGEST)) | {"remote_num_blocks": -1}, None),
    ],
)
def test_params_of_requests_are_parsed(params: Any, expected: KVTransfer | None) -> None:
    assert transfer_of(params) == expected


@pytest.mark.parametrize(
    "params", ["x", [1], {"do_remote_decode": 3}, {str(i): 1 for i in range(65)}]
)
def test_invalid_params_are_rejected(params: Any) -> None:
    with pytest.raises(RequestError, match="kv_transfer_params"):
        transfer_of(params)


def test_kv_transfer_config_is_parsed_and_checked() -> None:
    assert parse_transfer(None).role == BOTH and not parse_transfer(None).needs_store
    found = parse_transfer(
        '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer", "x": 1}'
    )
    assert found.role == CONSUMER and found.needs_store
    for odd in ("[]", '{"kv_connector": 3}', '{"kv_connector_extra_config": 1}'):
        with pytest.raises(ConfigError, match="kv_"):
            parse_transfer(odd)
    with pytest.raises(ConfigError, match="needs a list"):
        parse_transfer('{"kv_connector": "MultiConnector"}')
