"""Secrets are masked in every text, and whole for code that requests their value."""

import copy
import dataclasses
import json

import msgspec
import pytest

from quire.base.errors import ConfigError
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.config import EngineConfig, ServerConfig, config_from_flat, public_settings
from quire.base.settings.secrets import Secret, SecretJson, SecretUrl, public_value, reveal_secret
from quire.engine.connectors.make import make_store

MARKER = "MARK3R-s3cret"


@pytest.mark.parametrize("kind", [Secret, SecretUrl, SecretJson])
def test_no_text_shows_a_secret(kind: type[Secret]) -> None:
    given = {
        Secret: MARKER,
        SecretUrl: f"redis://user:{MARKER}@cache:6379/0?password={MARKER}",
        SecretJson: json.dumps({"kv_connector_extra_config": {"token": MARKER}}),
    }[kind]
    secret = kind(given)
    shown = [
        str(secret), repr(secret), f"{secret}", f"{secret!r:>99}", str([secret]),
        str({"a": (secret,)}), str(public_value((secret,))), json.dumps(public_value([secret])),
        secret.scrub(f"cannot connect to {given}"),
    ]  # fmt: skip
    assert not [text for text in shown if MARKER in text]
    assert secret == given and hash(secret) == hash(given) and secret.reveal() == given
    for same in (copy.deepcopy(secret), kind(secret)):
        assert type(same) is kind and same.reveal() == given
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)
    assert msgspec.json.decode(msgspec.json.encode(secret, enc_hook=reveal_secret)) == given


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        (f"redis://:{MARKER}@cache:6379", "redis://:***@cache:6379"),
        (f"redis://{MARKER}@cache", "redis://***@cache"),
        (f"s3://bucket/prefix?key={MARKER}&via=nixl", "s3://bucket/prefix?key=***&via=nixl"),
        ("dir:/var/cache/kv", "dir:/var/cache/kv"),
        (f"valkey:{MARKER}", "valkey:***"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        (f"http://me:{MARKER}%40x@collector", "http://me:***@collector"),
    ],
)
def test_urls_are_shown_without_their_secrets(url: str, shown: str) -> None:
    assert str(SecretUrl(url)) == shown
    assert SecretUrl(url).has_secret == (MARKER in url and not url.startswith("valkey"))


def secret_fields(kind: type) -> list[str]:
    """Return the fields whose names suggest a secret."""
    words = ("key", "password", "secret", "token", "endpoint", "store", "connector", "transfer")
    not_secret = {
        "long_prefill_token_threshold", "max_num_batched_tokens", "tokens_per_minute",
        "record_tokens", "tokenizer", "tokenizer_revision", "ssl_keyfile",
        "response_store_bytes", "return_tokens_as_token_ids",
    }  # fmt: skip
    names = [item.name for item in dataclasses.fields(kind)]
    return [n for n in names if any(word in n for word in words) and n not in not_secret]


def test_settings_named_like_secrets_are_declared_as_secrets() -> None:
    """A new setting needs `secrecy`, or an entry in the list above."""
    for kind in (CacheConfig, ServerConfig):
        known = {item.name: item.metadata.get("secrecy") for item in dataclasses.fields(kind)}
        undeclared = [name for name in secret_fields(kind) if known[name] is None]
        assert not undeclared, (kind, undeclared)


def test_a_configuration_shows_no_secret() -> None:
    store, transfer = f"redis://u:{MARKER}@cache", {"kv_connector_extra_config": {"p": MARKER}}
    engine = config_from_flat(
        model="demo", kv_store=(store,), kv_transfer_config=json.dumps(transfer)
    )
    server = ServerConfig(
        api_key=(MARKER,), urgent_api_key=(MARKER,), admin_api_key=(MARKER,),
        otlp_traces_endpoint=f"http://u:{MARKER}@collector",
    )  # fmt: skip
    assert MARKER not in f"{engine} {engine!r} {server} {server!r} {public_settings(engine)}"
    sent = msgspec.json.encode(engine, enc_hook=reveal_secret)
    assert msgspec.json.decode(sent, type=EngineConfig) == engine
    again = msgspec.json.decode(
        msgspec.json.encode(server, enc_hook=reveal_secret), type=ServerConfig
    )
    assert again == server and MARKER not in repr(again)


@pytest.mark.parametrize(
    "store",
    [f"redis://u:{MARKER}@host:port", f"redis://u:{MARKER}@[", f"nothing:{MARKER}"],
)
def test_an_error_shows_no_secret(store: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_store(store, 1)
    assert MARKER not in str(raised.value)
