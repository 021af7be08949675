"""The accepted values of `kv_events_config`."""

import json

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import config_from_flat
from quire.base.settings.kv_events import KVEventsConfig, is_bound, parse_kv_events, shifted


def test_events_are_off_by_default() -> None:
    assert not parse_kv_events(None).is_on
    assert not parse_kv_events("{}").is_on
    assert not parse_kv_events('{"endpoint": "tcp://*:5557"}').is_on
    off = {"enable_kv_cache_events": True, "publisher": "null"}
    assert not parse_kv_events(json.dumps(off)).is_on


def test_vllm_fields_are_accepted_and_token_ids_are_off_by_default() -> None:
    given = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 20,
        "hwm": 30,
        "max_queue_size": 40,
        "topic": "kv@pod@model",
    }
    found = parse_kv_events(json.dumps(given))
    assert found == KVEventsConfig(
        True, "zmq", "tcp://*:5557", "tcp://*:5558", 20, 30, 40, "kv@pod@model", token_ids=False
    )
    assert found.is_on
    default = parse_kv_events('{"enable_kv_cache_events": true}')
    assert default.is_on and "127.0.0.1" in default.endpoint


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("[]", "JSON object"),
        ("{", "must be a JSON object"),
        ('{"enabled": true}', "has no enabled"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events must be true or false"),
        ('{"token_ids": "yes"}', "token_ids"),
        ('{"publisher": "nats"}', "publisher must be null or zmq"),
        ('{"buffer_steps": 0}', "buffer_steps must be a whole number from 1"),
        ('{"hwm": 0}', "hwm"),
        ('{"max_queue_size": 1e99}', "max_queue_size"),
        ('{"topic": null}', "topic must be a text"),
        ('{"endpoint": null}', "endpoint must be like"),
        ('{"endpoint": "5557"}', "endpoint must be like"),
        ('{"endpoint": "tcp://*:70000"}', "endpoint must be like"),
        ('{"endpoint": "http://x:1"}', "endpoint must be like"),
        ('{"replay_endpoint": "tcp://router:5558"}', "an address to listen on"),
    ],
)
def test_invalid_values_are_rejected(given: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_kv_events(given)
    with pytest.raises(ConfigError, match=named):
        config_from_flat(kv_events_config=given)


def test_wildcard_and_local_endpoints_are_bound() -> None:
    for endpoint in (
        "tcp://*:5557", "tcp://[::]:5557", "tcp://127.0.0.1:5557", "tcp://localhost:5557",
        "tcp://[::1]:5557", "ipc:///run/kv", "inproc://kv",
    ):  # fmt: skip
        assert is_bound(endpoint), endpoint
    for endpoint in ("tcp://router:5557", "tcp://10.0.0.3:5557", "tcp://localhost.example:5557"):
        assert not is_bound(endpoint), endpoint


def test_each_core_has_its_own_endpoint() -> None:
    assert shifted("tcp://*:5557", 0) == "tcp://*:5557"
    assert shifted("tcp://*:5557", 3) == "tcp://*:5560"
    assert shifted("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert shifted("tcp://127.0.0.1:0", 1) == "tcp://127.0.0.1:0"
    assert shifted("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"
