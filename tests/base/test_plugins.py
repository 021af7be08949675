"""Plug-ins of other packages: the examples of docs/extend are installed unchanged and used by
engines and servers."""

import asyncio
import http.client
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError, ModelError, RequestError
from quire.base.plugins import (
    ATTENTION_BACKENDS,
    BLOCK_HASHES,
    CONNECTORS,
    EVICTION_POLICIES,
    HOOKS,
    KINDS,
    MODELS,
    POLICIES,
    TOOL_FORMATS,
    TRANSFERS,
)
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.connectors.store import BlockStore
from quire.kv.pool import EvictionPolicy
from quire.models.registry import model_class
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.select import make_backend
from quire.render.answers.detect import check_names, detect_format
from quire.render.answers.format import RequestedAnswer
from quire.render.answers.parts import CallArguments, CallBegun, CallEnded, Content, Reasoning
from quire.render.answers.syntax import Tool
from quire.scheduler.core.queue import Policy
from quire.scheduler.policy import policies
from quire.scheduler.policy.policies import make_block_hash, make_eviction, make_policy
from quire.serve.hooks.hooks import Hooks
from tests.support.commands import run
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.plugin_site import EXAMPLES, Site
from tests.support.processes.servers import Server

SMALL = {"disable_log_stats": True, "max_model_len": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i, 17, 3, 60]} for i in range(5)]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    )
    return Site(folder)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def served(model: str, **settings: object) -> list[list[int]]:
    with LLM(model, **SMALL, **settings) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return served(str(checkpoint("llama")))


# ---- the examples of docs/extend ----------------------------------------------------------------


def test_docs_have_one_example_of_each_kind_of_plugin() -> None:
    groups = [group for _, each in EXAMPLES.values() for group in each["project"]["entry-points"]]
    kinds = [kind.group for kind in KINDS if kind is not TRANSFERS]  # see plugins/nixl_transfer.py
    assert sorted(groups) == sorted(kinds)


def test_scheduling_policy_changes_the_order_of_requests(
    site: Site, expected: list[list[int]]
) -> None:
    site.install_example("quire_lifo")
    folder = str(checkpoint("llama"))
    with LLM(folder, **SMALL, max_num_seqs=1, scheduling_policy="lifo") as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == expected
    times = [output.metrics.first_token_s for output in outputs if output.metrics]
    assert times == sorted(times, reverse=True)
    with LLM(folder, **SMALL, max_num_seqs=1) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    times = [output.metrics.first_token_s for output in outputs if output.metrics]
    assert times == sorted(times)


def cached(**settings: object) -> tuple[list[list[int]], list[int | None]]:
    """Return the tokens and the cached token counts of six prompts, served one after the other.

    The pool has room for one long prompt and one short one."""
    few = SMALL | {"max_model_len": 32, "block_size": 4, "max_num_seqs": 1}
    sizes = ((5, 21), (5, 21), (30, 9), (60, 9), (80, 9), (5, 21))
    prompts = [{"prompt_token_ids": [*range(first, first + num)]} for first, num in sizes]
    outputs = []
    with LLM(str(checkpoint("llama")), **few, **settings) as llm:
        pool = llm.engine.client.core.scheduler.memory.kv.pools[0]
        assert pool.num_blocks == 9
        for prompt in prompts:
            outputs += llm.generate([prompt], GREEDY, use_tqdm=False)
    return tokens(outputs), [output.num_cached_tokens for output in outputs]


def test_eviction_policy_decides_which_blocks_stay_cached(site: Site) -> None:
    site.install_example("quire_slru")
    expected, by_default = cached()
    assert by_default == [0, 20, 0, 0, 0, 0]
    for name in ("lfu", "slru"):
        assert cached(eviction_policy=name) == (expected, [0, 20, 0, 0, 0, 20])
    with pytest.raises(ConfigError, match=r"eviction_policy .* lru, lfu, slru \(of quire-slru 1.0"):
        config_from_flat(eviction_policy="oldest")


def test_block_hash_plugin_names_blocks_without_changing_tokens(site: Site) -> None:
    site.install_example("quire_sha512")
    prompts, settings = [PROMPTS[0]] * 2, SMALL | {"block_size": 1, "max_num_seqs": 1}
    found = []
    for name in (*policies.BLOCK_HASHES, "sha512_256"):
        with LLM(str(checkpoint("llama")), prefix_caching_hash_algo=name, **settings) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.num_cached_tokens for output in outputs] == [0, 3]
            kv = llm.engine.client.core.scheduler.memory.kv
            found.append((tokens(outputs), frozenset(kv.pools[0]._index)))
    assert len({str(each) for each, _ in found}) == 1
    assert len({names for _, names in found}) == 3, "sha256_cbor is sha256"
    with pytest.raises(ConfigError, match=r"_hash_algo .* blake2b, sha512_256 \(of quire-sha512"):
        config_from_flat(prefix_caching_hash_algo="xxhash")


def test_attention_backend_plugin_gives_the_same_tokens(
    site: Site, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install_example("quire_counting")
    counting = importlib.import_module("quire_counting").CountingBackend
    made, make = [], counting.__init__

    def record_backend(backend: AttentionBackend, layout: KVLayout) -> None:
        made.append(backend)
        make(backend, layout)

    monkeypatch.setattr(counting, "__init__", record_backend)
    assert served(str(checkpoint("llama")), attention_backend="counting") == expected
    [backend] = made
    assert backend.name == "counting"
    assert backend.num_steps >= 6
    # Every token of a request except the last one sampled.
    assert backend.num_tokens == len(PROMPTS) * (4 + 6 - 1)


def test_model_plugin_gives_the_same_tokens(
    site: Site, tmp_path: Path, expected: list[list[int]]
) -> None:
    site.install_example("quire_fable")
    folder = tmp_path / "fable"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "fable", "fable_biases": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert served(str(folder)) == expected


def test_answer_format_plugins_parse_reasoning_and_tool_calls(site: Site) -> None:
    site.install_example("quire_arrows")
    site.install_example("quire_musing")
    found = detect_format(None, None, "arrows", "musing")
    parser = RequestedAnswer(found, (Tool("weather"),)).parser()
    parts = parser.push('<musing>Rain?</musing>Look:\n>>weather({"city": "Oslo"})<<')
    assert [part for part in parts if not isinstance(part, CallBegun)] == [
        Reasoning("Rain?"),
        Content("Look:"),
        CallArguments(0, '{"city": "Oslo"}'),
        CallEnded(0),
    ]
    with pytest.raises(
        ConfigError, match=r"no format of tool calls 'bows'; .*arrows \(of quire-ar"
    ):
        check_names("bows", "musing")
    with pytest.raises(ConfigError, match=r"no format of reasoning 'm'; .*musing \(of quire-mus"):
        check_names("arrows", "m")


def test_format_plugin_of_the_wrong_type_is_rejected(site: Site) -> None:
    source = "class Odd:\n    def format(self): return 5\n"
    site.install("odd-format", TOOL_FORMATS, "odd", "odd_format:Odd", source)
    with pytest.raises(ConfigError, match="'odd' provides a int; it must be a CallFormat"):
        detect_format(None, None, "odd")


def test_hook_plugin_filters_prompts_and_answers(site: Site) -> None:
    site.install_example("quire_manners")
    with LLM("demo", disable_log_stats=True, hooks=["manners"]) as llm:
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        [output] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=40), False)
        assert "#" in output.outputs[0].text and not re.search(r"\d", output.outputs[0].text)
        with pytest.raises(RequestError, match="looks like a key"):
            llm.generate("my key is sk-0123456789", GREEDY)
    assert ServerConfig(hooks=("manners",)).hooks == ("manners",)
    with pytest.raises(ConfigError, match=r"no hook 'unheard'.*: manners \(of quire-manners 1.0\)"):
        ServerConfig(hooks=("manners", "unheard"))


def test_logits_processor_plugin_masks_tokens_and_reports_bad_arguments(site: Site) -> None:
    site.install_example("quire_hush")
    requested = {"name": "hush", "kwargs": {"below": 9}}
    with LLM("demo", disable_log_stats=True, logits_processors=["hush"]) as llm:
        params = [
            SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True, logits_processors=[each])
            for each in (requested, {"name": "hush"}, {"name": "hush", "kwargs": {"below": "x"}})
        ]
        good, *bad = llm.generate(["Hi"] * 3, params, use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 6 and max(good.outputs[0].token_ids) < 9
    for output, reason in zip(bad, ("'below'", "TypeError"), strict=True):
        assert output.outputs[0].error is not None
        assert reason in output.outputs[0].error.message
    with pytest.raises(ConfigError, match=r"no logits processor 'loud'; .*: hush \(of quire-hush"):
        config_from_flat(logits_processors=("loud",))


def test_server_runs_hooks_and_requested_logits_processors(site: Site) -> None:
    site.install_example("quire_manners")
    site.install_example("quire_hush")
    server = Server("--hooks", "manners", "--hook-timeout", "20", "--logits-processors", "hush")
    try:
        check_hooks(server)
        check_logits_processors(server)
    finally:
        assert server.stop() == 0


def check_hooks(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    status, answer = post(server, body)
    text = answer["choices"][0]["message"]["content"]
    assert status == 200 and "#" in text and not re.search(r"\d", text)
    body["messages"] = [{"role": "user", "content": "my key is sk-0123456789"}]
    status, answer = post(server, body)
    assert status == 400 and answer["error"]["code"] == "content_filter"


def check_logits_processors(server: Server) -> None:
    body: dict = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    body |= {"logprobs": True, "return_token_ids": True, "ignore_eos": True}
    requested = [{"name": "hush", "kwargs": {"below": 9}}]
    status, answer = post(server, body | {"logits_processors": requested})
    assert status == 200, answer
    assert max(answer["choices"][0]["token_ids"]) < 9
    for wrong, reason in (
        (["loud"], "no logits processor 'loud'; the setting logits_processors"),
        ([{"name": "hush", "kwarg": {}}], "kwarg"),
        ("hush", "list"),
    ):
        status, answer = post(server, body | {"logits_processors": wrong})
        assert status == 400 and reason in answer["error"]["message"], answer
    status, answer = post(server, body | {"logits_processors": ["hush"]})
    assert status >= 400 and "TypeError" in answer["error"]["message"], answer


def post(server: Server, body: dict) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_hooks_that_cannot_be_created_or_have_no_method_are_rejected(site: Site) -> None:
    source = "class Hook:\n    def __init__(self, x): ...\n    def on_output(self, p): ...\n"
    site.install("early", HOOKS, "early", "early_hook:Hook", source)
    with pytest.raises(ConfigError, match="'early' cannot be created: TypeError"):
        Hooks(["early"])
    site.install("idle", HOOKS, "idle", "idle_hook:Hook", "class Hook: ...\n")
    reason = "it has no before_admission, on_output, on_tool_call"
    with pytest.raises(ConfigError, match=f"idle 1.0.*cannot be used: {reason}"):
        Hooks(["idle"])


def test_command_line_accepts_plugin_names_and_help_lists_builtin_ones(
    site: Site, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    site.install_example("quire_lifo")
    site.install_example("quire_counting")
    caplog.set_level(logging.INFO, "quire")
    flags = ("--scheduling-policy", "lifo", "--attention-backend", "counting")
    status, _, stderr = run(capsys, "generate", "Hi", "--max-tokens", "3", *flags)
    assert status == 0 and "attention: counting" in caplog.text, stderr
    shown = run(capsys, "generate", "--help", "all")[1]
    assert "--attention-backend {auto,cpu,torch,reference,triton,triton_64,flashinfer," in shown
    assert "--scheduling-policy {fifo,srtf,two-level,...}" in shown
    status, _, stderr = run(capsys, "generate", "Hi", "--scheduling-policy", "lottery")
    assert status != 0
    assert "scheduling_policy must be one of fifo, srtf, two-level" in stderr
    assert "lifo (of quire-lifo 1.0), got 'lottery'" in stderr
    file = site.folder / "settings.yaml"
    file.write_text("scheduling-policy: lifo\n")
    status, _, stderr = run(capsys, "generate", "Hi", "--max-tokens", "1", "--config", str(file))
    assert status == 0, stderr


def test_doctor_lists_installed_plugins(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nplug-ins\n  none\n" in run(capsys, "doctor", "--device", "cpu")[1]
    site.install_example("quire_lifo")
    site.install_example("quire_counting")
    site.install("other-lifo", MODELS, "lifo", "no_such_module:Lifo")  # it is not imported
    shown = run(capsys, "doctor", "--device", "cpu")[1]
    assert "\n  counting           attention backend of quire-counting 1.0\n" in shown
    both = "scheduling policy of quire-lifo 1.0, model type of other-lifo 1.0"
    assert f"\n  lifo               {both}\n" in shown


def test_core_in_another_process_finds_plugins(site: Site, expected: list[list[int]]) -> None:
    site.install_example("quire_lifo")
    settings = SMALL | {"scheduling_policy": "lifo", "max_num_seqs": 1}

    async def program() -> list[list[int]]:
        async with await AsyncLLM.create(str(checkpoint("llama")), **settings) as llm:
            return await asyncio.gather(*(token_ids_of(llm, prompt) for prompt in PROMPTS))

    async def token_ids_of(llm: AsyncLLM, prompt: dict) -> list[int]:
        return [o async for o in llm.generate(prompt, GREEDY)][-1].outputs[0].token_ids

    assert asyncio.run(program()) == expected


@pytest.mark.parametrize(
    ("example", "chosen"),
    [
        ("quire_lifo", {"scheduling_policy": "lifo"}),
        pytest.param("quire_slru", {"eviction_policy": "slru"}, marks=pytest.mark.slow),
    ],
)
def test_recording_with_a_policy_of_another_package_is_rejected(
    site: Site, tmp_path: Path, example: str, chosen: dict
) -> None:
    site.install_example(example)
    [(name, value)] = chosen.items()
    settings = SMALL | chosen | {"record": str(tmp_path / "run")}
    reason = f"{name.replace('_', ' ')} '{value}', which another package .*; remove record"
    for make in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match=reason):
            make(str(checkpoint("llama")), **settings)
    assert not (tmp_path / "run").exists()


# ---- errors ------------------------------------------------------------------------------------


def test_unknown_name_errors_list_builtin_and_plugin_names(site: Site) -> None:
    site.install_example("quire_lifo")
    site.install_example("quire_counting")
    site.install_example("quire_fable")
    with pytest.raises(ConfigError, match=r"scheduling_policy .* fifo, .*lifo \(of quire-lifo 1.0"):
        config_from_flat(scheduling_policy="lottery")
    with pytest.raises(ConfigError, match=r"attention_backend .* cpu, .*counting \(of quire-coun"):
        config_from_flat(attention_backend="magic")
    with pytest.raises(ModelError, match=r"'unheard' is not.*llama, .*fable \(of quire-fable 1.0"):
        model_class("unheard")


def test_plugin_import_errors_are_reported(site: Site) -> None:
    site.install("broken", POLICIES, "broken", "broken_one:Policy", "import no_such_module\n")
    assert config_from_flat(scheduling_policy="broken")  # checking a name imports nothing
    with pytest.raises(ConfigError, match="broken 1.0, broken_one:Policy, cannot be imported: Mod"):
        make_policy("broken")
    site.install("nameless", MODELS, "nameless", "nameless_one:Model", "")
    with pytest.raises(ModelError, match="nameless 1.0.*cannot be imported: AttributeError"):
        model_class("nameless")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Policy = 5", "it must be a class, and is a int"),
        ("def Policy(remaining): ...", "it must be a class, and is a function"),
        ("class Policy:\n    def push(self, s): ...\n", "it has no peek, "),
    ],
)
def test_policy_plugin_must_be_a_class_with_the_required_methods(
    site: Site, source: str, reason: str
) -> None:
    module = f"odd_{abs(len(source))}"
    site.install("odd", POLICIES, "odd", f"{module}:Policy", source)
    with pytest.raises(ConfigError, match=f"odd 1.0.*cannot be used: {reason}"):
        make_policy("odd")


def test_invalid_eviction_policies_and_block_hashes_are_rejected(site: Site) -> None:
    site.install("idle", EVICTION_POLICIES, "idle", "idle_one:Idle", "class Idle: ...\n")
    with pytest.raises(ConfigError, match="idle 1.0.*cannot be used: it has no __setitem__, __del"):
        make_eviction("idle")
    site.install("null", BLOCK_HASHES, "null", "null_one:Null", "class Null: ...\n")
    with pytest.raises(ConfigError, match="null 1.0.*cannot be used: it has no digest"):
        make_block_hash("null")
    for name in ("unheard", "unseen"):
        with pytest.raises(ConfigError, match=f"no eviction policy '{name}'; there are lru, lfu"):
            make_eviction(name)


def test_policy_that_cannot_be_created_is_a_config_error(site: Site) -> None:
    source = EXAMPLES["quire_lifo"][0].replace("progress: Progress", "")
    site.install("early", POLICIES, "early", "early_one:Lifo", source)
    with pytest.raises(ConfigError, match="'early' cannot be created: TypeError"):
        make_policy("early")


def test_model_plugin_must_be_an_nn_module(site: Site) -> None:
    source = "class Model:\n    def forward(self): ...\n    def logits(self): ...\n"
    site.install("plain", MODELS, "plain", "plain_one:Model", source)
    with pytest.raises(ModelError, match="not an nn.Module"):
        model_class("plain")


def test_attention_backend_plugin_must_be_a_subclass(site: Site) -> None:
    names = ("prepare", "write", "run", "copy_blocks", "swap_out", "load")
    source = "class Backend:\n" + "".join(f"    def {name}(self): ...\n" for name in names)
    site.install("bare", ATTENTION_BACKENDS, "bare", "bare_one:Backend", source)
    layout = KVLayout((), (), 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="Backend must be a subclass of AttentionBackend"):
        make_backend("bare", layout)


def test_error_names_both_packages_that_provide_one_name(site: Site) -> None:
    for package in ("first-lifo", "second-lifo"):
        site.install(package, POLICIES, "lifo", "quire_lifo:Lifo", EXAMPLES["quire_lifo"][0])
    with pytest.raises(ConfigError, match=r"first-lifo 1.0 and second-lifo 1.0 both provide"):
        make_policy("lifo")


def test_builtin_name_wins_over_a_plugin_with_a_warning(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("usurper", POLICIES, "fifo", "usurper_one:Policy", "raise SystemExit\n")
    ours = make_policy("fifo")
    assert ours.__module__ == "quire.scheduler.core.queue"  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as refused:
        make_policy("other")
    assert "usurper" not in str(refused.value)
    assert "usurper 1.0 provides a scheduling policy 'fifo', which is also built in" in caplog.text


def test_required_methods_match_the_protocols() -> None:
    pairs = ((POLICIES, Policy), (EVICTION_POLICIES, EvictionPolicy), (CONNECTORS, BlockStore))
    for kind, protocol in pairs:
        methods = [
            name
            for name, value in vars(protocol).items()
            if callable(value) and (not name.startswith("_") or name in kind.methods)
        ]
        assert sorted(methods) == sorted(kind.methods)
    assert AttentionBackend.__abstractmethods__ == set(ATTENTION_BACKENDS.methods)


def test_builtin_names_do_not_read_entry_points() -> None:
    """Importing importlib.metadata would slow down every start."""
    code = (
        "import sys; from quire.base.settings.config import config_from_flat;"
        "config_from_flat(scheduling_policy='fifo', attention_backend='torch');"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
