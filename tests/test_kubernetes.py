"""The manifests for Kubernetes name paths, flags, ports, limits and metrics that there are."""

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.base.settings.config import CacheConfig, ServerConfig, config_from_flat
from quire.base.settings.kv_events import TCP, parse_kv_events
from quire.cli.config_file import resolve
from quire.cli.main import _parse
from quire.cli.settings import given_server_settings, given_settings
from quire.engine.observability.exposition import Exposition
from quire.serve.native.document import PUBLIC
from tests.engine.observability.test_metrics import idle_scheduler, new_metrics

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
MODEL = "Qwen/Qwen3-8B"
KEEPS_AT_END_S = 50  # docs/use/prefix-caching.md: what is cached goes to a store


@cache
def manifests() -> dict[str, Any]:
    found = list(yaml.safe_load_all((FOLDER / "quire.yaml").read_text()))
    return {each["kind"]: each for each in found}


@cache
def values() -> Any:
    return yaml.safe_load((FOLDER / "epp-values.yaml").read_text())


@cache
def plugins() -> Any:
    extension = values()["inferenceExtension"]
    return yaml.safe_load(extension["pluginsCustomConfig"][extension["pluginsConfigFile"]])


def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


def ports() -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container()["ports"]}


@cache
def arguments() -> argparse.Namespace:
    """The arguments as the image's entry point gets them, as `quire` reads them."""
    found = _parse([word.replace("$(POD_IP)", "10.0.0.3") for word in container()["args"]])
    assert resolve(found) == []
    return found


def test_the_arguments_are_a_configuration() -> None:
    config = config_from_flat(**given_settings(arguments()))
    server = ServerConfig(**given_server_settings(arguments()))
    assert config.model.model == MODEL
    assert server.port == ports()["http"] and server.host == "0.0.0.0"
    assert server.metrics_prefix == "vllm"
    assert not server.api_key, "a picker brings no key to /metrics"
    events = parse_kv_events(config.kv_events_config)
    assert events.is_on and events.token_ids and events.topic == f"kv@10.0.0.3:8000@{MODEL}"
    for name, endpoint in (("events", events.endpoint), ("replay", events.replay_endpoint or "")):
        tcp = TCP.fullmatch(endpoint)
        assert tcp is not None and tcp["host"] == "*" and int(tcp["port"]) == ports()[f"kv-{name}"]


@pytest.mark.parametrize("name", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_what_answers_without_a_key(name: str) -> None:
    get = container()[name]["httpGet"]
    assert get["path"] in PUBLIC and get["port"] == "http"
    assert (get["path"] == "/ready") == (name == "readinessProbe"), "a drain is no reason to kill"


def test_there_is_time_for_the_end() -> None:
    server = ServerConfig(**given_server_settings(arguments()))
    waits_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    wanted = waits_s + server.shutdown_timeout + KEEPS_AT_END_S
    assert pod()["terminationGracePeriodSeconds"] >= wanted
    assert (
        f"latest {KEEPS_AT_END_S} s after SIGTERM"
        in (ROOT / "docs/use/prefix-caching.md").read_text()
    )


def test_it_fits_the_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"--uid {pod()['securityContext']['runAsUser']} " in dockerfile
    assert f"--home-dir {container()['volumeMounts'][0]['mountPath']} " in dockerfile
    assert 'ENTRYPOINT ["quire"]' in dockerfile and container()["args"][0] == "serve"
    assert dockerfile.count("[otel,events]") == 2, "events need pyzmq"
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert volumes == {mount["name"] for mount in container()["volumeMounts"]}


def test_everything_selects_the_same_pods() -> None:
    deployment = manifests()["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert manifests()["Service"]["spec"]["selector"] == labels
    assert manifests()["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert values()["inferencePool"]["modelServers"]["matchLabels"] == labels
    assert values()["inferencePool"]["targetPorts"] == [{"number": ports()["http"]}]


def test_ports_go_by_names_that_there_are() -> None:
    named = [port["targetPort"] for port in manifests()["Service"]["spec"]["ports"]]
    rules = manifests()["NetworkPolicy"]["spec"]["ingress"]
    named += [port["port"] for rule in rules for port in rule["ports"]]
    assert set(named) == set(ports())
    for rule in rules:
        is_open = "from" not in rule
        assert is_open == ([port["port"] for port in rule["ports"]] == ["http"])


def test_the_picker_asks_for_metrics_that_there_are() -> None:
    text = Exposition(
        new_metrics(), idle_scheduler().view, "fox", CacheConfig(), prefix="vllm"
    ).text()
    families = text_string_to_metric_families(text)
    known = {s.name: set(s.labels) for family in families for s in family.samples}
    (extractor,) = [p for p in plugins()["plugins"] if p["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert engine["name"] == extractor["parameters"]["defaultEngine"]
    specs = {name: spec for name, spec in engine.items() if name.endswith("Spec")}
    assert len(specs) == 4 and set(specs.values()) <= known.keys()
    assert {"block_size", "num_gpu_blocks"} <= known[specs["cacheInfoSpec"]]
    (source,) = [p for p in plugins()["plugins"] if p["type"] == "metrics-data-source"]
    assert source["parameters"]["path"] == "/metrics"


def test_a_profile_uses_plugins_that_are_listed() -> None:
    listed = {plugin["type"] for plugin in plugins()["plugins"]}
    (profile,) = plugins()["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= listed
