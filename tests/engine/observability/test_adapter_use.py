"""Adapter metrics: requests by adapter name with a bound on names, and adapters by state at scrape
time."""

from dataclasses import replace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.virtual.dry_run import dry_request
from quire.base.messages import Request
from quire.base.settings.cache_config import CacheConfig
from quire.engine.observability.adapter_use import MAX_NAMES, OTHERS, AdapterUse
from quire.engine.observability.exposition import Exposition
from quire.scheduler.views import RequestView
from tests.engine.observability.test_metrics import idle_scheduler, new_metrics

PLAIN = dry_request("plain", [1, 2], 4)


def request(name: str, adapter_id: str = "0123456789abcdef" * 4) -> Request:
    return msgspec.structs.replace(PLAIN, adapter_id=adapter_id, adapter_name=name)


def view(made: Request, row: int | None = None) -> RequestView:
    found = RequestView(made, 2, 0.0, -1, (), (), is_waiting=True)
    return found if row is None else replace(found, rows=(row,), is_waiting=False)


def test_number_of_adapter_names_is_bounded() -> None:
    use = AdapterUse(2)
    for number in range(MAX_NAMES + 5):
        use.count(request(f"a{number}"))
    for name in ("a3", "new", ""):
        use.count(request(name))
    assert len(use.num_requests) == MAX_NAMES + 1
    assert use.num_requests["a3"] == 2 and use.num_requests[OTHERS] == 7


def test_metrics_list_adapters_by_state_and_requests_by_adapter() -> None:
    views = [
        view(request("sql"), row=1),
        view(request("poems")),
        view(request("sql"), row=2),
        view(request("")),
        view(PLAIN, row=0),
    ]
    use = AdapterUse(8, lambda: views)
    use.count(request("sql"))
    args = new_metrics(), idle_scheduler().view, "tiny", CacheConfig()
    text = Exposition(*args, prefix="vllm", adapters=use).text()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    [info] = families["vllm:lora_requests_info"].samples
    assert info.value > 1e9
    assert {name: info.labels[name] for name in info.labels if "lora" in name} == {
        "max_lora": "8",
        "running_lora_adapters": "sql",
        "waiting_lora_adapters": "0123456789abcdef,poems",
    }
    [count] = families["quire:adapter_requests"].samples
    assert count.labels["adapter"] == "sql" and count.value == 1
    assert "adapter" not in Exposition(*args).text()


@pytest.mark.parametrize("name", ["x", "x" * 5000])
def test_long_adapter_names_are_truncated(name: str) -> None:
    use = AdapterUse(1)
    use.count(request(name))
    assert all(len(each) <= 256 for each in use.num_requests)
