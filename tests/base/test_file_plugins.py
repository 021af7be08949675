"""Plug-ins of one file, `./mine.py:Policy`: they work like a package's plug-ins."""

import operator
import re
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelError, RequestError
from quire.base.plugins import (
    CONNECTORS,
    EVICTION_POLICIES,
    HOOKS,
    IMAGE_PROCESSORS,
    MODELS,
    POLICIES,
    TRANSFERS,
    PluginKind,
    file_class,
    is_installed,
    load_plugin,
    short_name,
)
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start import build
from quire.models.registry import model_class
from quire.scheduler.core.queue import Fifo
from quire.scheduler.policy.policies import make_eviction, make_policy
from quire.serve.hooks.hooks import Hooks
from tests.structure.test_house import ROOT
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.plugin_site import EXAMPLES

SMALL: dict[str, Any] = {"disable_log_stats": True, "max_model_len": 96, "max_num_seqs": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i, 17, 3, 60]} for i in range(4)]
PAGE = ROOT / "docs" / "extend" / "policies.md"
NAME = re.compile(r"^\| `(sequence|progress)\.([\w.]+)(\(\w*\))?` \|", re.MULTILINE)


def write(folder: Path, source: str, name: str = "mine") -> str:
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


def test_file_class_splits_a_name_into_path_and_class() -> None:
    assert file_class("./mine.py:Policy") == (Path("mine.py"), "Policy")
    assert [file_class(n) for n in ("fifo", "mine.py", "pkg:Policy", "shape:x")] == [None] * 4
    assert short_name("a/b.py:Mine") == "Mine" and short_name("hush") == "hush"


def test_policy_from_a_file_changes_the_order_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, EXAMPLES["quire_lifo"][0])
    monkeypatch.chdir(tmp_path)
    with LLM(str(checkpoint("llama")), **SMALL, scheduling_policy="./mine.py:Lifo") as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    times = [output.metrics.first_token_s for output in outputs if output.metrics]
    assert len(times) == 4 and times == sorted(times, reverse=True)


def test_attributes_documented_for_policies_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every attribute in the page's table from a running sequence and scheduler."""
    found = NAME.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == 13
    seen: list[object] = []

    class Spy(Fifo):
        def __init__(self, progress: Any) -> None:
            super().__init__(progress)
            self.progress = progress

        def push(self, sequence: Any) -> None:
            super().push(sequence)
            for owner, name, call in found:
                value = operator.attrgetter(name)(
                    sequence if owner == "sequence" else self.progress
                )
                seen.append(value(*([sequence] if "sequence" in call else [])) if call else value)

    monkeypatch.setattr(build, "make_policy", lambda name: Spy)
    with LLM(str(checkpoint("llama")), **SMALL) as llm:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert len(seen) == 13
    values = dict(zip([f"{owner}.{name}" for owner, name, _ in found], seen, strict=True))
    assert values["sequence.num_prompt_tokens"] == values["progress.remaining"] == 4
    assert values["sequence.params.max_tokens"] == 4
    assert values["progress.num_tokens_under_way"] == 0


def test_logits_processor_from_a_file_is_requested_by_its_class_name(tmp_path: Path) -> None:
    name = write(tmp_path, EXAMPLES["quire_hush"][0]) + ":Hush"
    with LLM(str(checkpoint("llama")), **SMALL, logits_processors=[name]) as llm:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=4,
            logits_processors=[{"name": "Hush", "kwargs": {"below": 9}}],
        )
        [output] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        assert max(output.outputs[0].token_ids) < 9
        other = SamplingParams(max_tokens=4, logits_processors=[{"name": name}])
        with pytest.raises(RequestError, match="Hush"):
            llm.generate(PROMPTS[:1], other, use_tqdm=False)


def test_plugins_from_one_file_share_a_module(tmp_path: Path) -> None:
    source = (
        "from collections import OrderedDict\n"
        "class Oldest(OrderedDict):\n    pass\n"
        "class Filter:\n    def before_admission(self, request):\n        pass\n"
    )
    path = write(tmp_path, source)
    assert Hooks([f"{path}:Filter"]).see("before_admission")
    assert make_eviction(f"{path}:Oldest")().__class__.__name__ == "Oldest"
    loaded = [
        load_plugin(kind, f"{path}:{name}", ())
        for kind, name in ((HOOKS, "Filter"), (EVICTION_POLICIES, "Oldest"))
    ]
    assert loaded[0].__module__ == loaded[1].__module__


REPEATED = {"prompt_token_ids": [7, 8, 9, 10] * 6}


def drafted(config: dict[str, Any] | None) -> tuple[list[int], int]:
    """Return the tokens after a repetitive prompt, and the number of accepted draft tokens."""
    settings = SMALL | {"speculative_config": config, "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=[40])
    with LLM(str(checkpoint("llama")), **settings) as llm:
        [output] = llm.generate([REPEATED], params, use_tqdm=False)
    assert output.metrics is not None
    return output.outputs[0].token_ids, output.metrics.num_accepted_draft_tokens


def test_drafter_from_a_file_gets_draft_tokens_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = write(tmp_path, EXAMPLES["quire_bigrams"][0]) + ":Bigrams"
    plain, _ = drafted(None)
    tokens, num_accepted = drafted({"method": name, "num_speculative_tokens": 4})
    assert tokens == plain and num_accepted > 0


@pytest.mark.parametrize("body", ["raise ValueError('no')", "return [10 ** 9, -1]", "return 5"])
def test_faulty_drafter_does_not_change_the_tokens(body: str, tmp_path: Path) -> None:
    source = "class Faulty:\n    def extend(self, token_ids):\n        pass\n"
    source += f"    def propose(self, num):\n        {body}\n"
    config = {"method": write(tmp_path, source) + ":Faulty"}
    assert drafted(config) == (drafted(None)[0], 0)


def test_drafter_that_fails_in_its_second_init_does_not_change_the_tokens(tmp_path: Path) -> None:
    source = "made = []\nclass Once:\n    def __init__(self):\n"
    source += "        made.append(self)\n        assert len(made) == 1\n"
    source += "    def extend(self, token_ids): pass\n    def propose(self, num): return [1]\n"
    config = {"method": write(tmp_path, source) + ":Once"}
    assert drafted(config) == (drafted(None)[0], 0)


def test_invalid_drafters_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, "class Mine:\n    def extend(self, token_ids): pass\n")
    with pytest.raises(ConfigError, match="has no class 'Other'"):
        config_from_flat(speculative_config={"method": f"{path}:Other"})
    with pytest.raises(ConfigError, match="cannot be used: it has no propose"):
        drafted({"method": f"{path}:Mine"})
    with pytest.raises(ConfigError, match="must be one of ngram, .*got 'nothing'"):
        config_from_flat(speculative_config={"method": "nothing"})


def test_hit_source_from_a_file_provides_cached_tokens(tmp_path: Path) -> None:
    """Prefix caching is off, so only the hit source knows the blocks of the previous prompt."""
    name = write(tmp_path, EXAMPLES["quire_last_prompt"][0]) + ":LastPrompt"
    settings = SMALL | {"scheduler_extensions": (name,), "block_size": 4}
    settings["enable_prefix_caching"] = False
    with LLM(str(checkpoint("llama")), **settings) as llm:
        [source] = [
            each
            for each in llm.engine.client.core.scheduler.extensions
            if type(each).__name__ == "LastPrompt"
        ]
        llm.generate([REPEATED], GREEDY, use_tqdm=False)
        assert len(source.entries) == 1 and len(source.entries[0][0]) == 24
        longer = {"prompt_token_ids": [*REPEATED["prompt_token_ids"], 5]}
        [again] = llm.generate([longer], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 24
    with pytest.raises(ConfigError, match="record=.* cannot record scheduler_extensions"):
        LLM(str(checkpoint("llama")), **settings, record=str(tmp_path / "recording"))


def test_invalid_scheduler_extensions_are_rejected(tmp_path: Path) -> None:
    source = "class Mine:\n    def enter(self, sequence, now): pass\n"
    source += "from quire.scheduler.core.extension import Extension\n"
    source += "class Wants(Extension):\n    def __init__(self): pass\n"
    path = write(tmp_path, source)
    for name, message in (("Mine", "must be a subclass of HitSource"), ("Wants", "a KVManager")):
        with pytest.raises(ConfigError, match=message):
            LLM(str(checkpoint("llama")), **SMALL, scheduler_extensions=(f"{path}:{name}",))


FAULTS = {
    "no file": (None, "Policy", "cannot be read from .*missing.py: No such file"),
    "no class": ("class Other: pass\n", "Policy", "has no class 'Policy'; it has: Other"),
    "syntax": ("class Policy(:\n", "Policy", "holds no valid Python: "),
    "methods": ("class Policy: pass\n", "Policy", "cannot be used: it has no push, peek"),
    "import": ("1 / 0\nclass Policy: pass\n", "Policy", "ZeroDivisionError.* Correct the file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files_are_rejected(fault: str, tmp_path: Path) -> None:
    source, name, message = FAULTS[fault]
    path = str(tmp_path / "missing.py") if source is None else write(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        make_policy(f"{path}:{name}")


@pytest.mark.parametrize("fault", ["no file", "no class", "syntax"])
def test_faults_are_found_before_a_model_is_loaded(fault: str, tmp_path: Path) -> None:
    source, name, message = FAULTS[fault]
    path = str(tmp_path / "missing.py") if source is None else write(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        config_from_flat(scheduling_policy=f"{path}:{name}")
    with pytest.raises(ConfigError, match=message):
        ServerConfig(hooks=(f"{path}:{name}",))


def test_checking_a_file_does_not_run_it(tmp_path: Path) -> None:
    path = write(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Policy: pass\n")
    assert is_installed(POLICIES, f"{path}:Policy", ())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [MODELS, IMAGE_PROCESSORS, CONNECTORS, TRANSFERS])
def test_kinds_that_need_a_package_do_not_load_files(kind: PluginKind, tmp_path: Path) -> None:
    body = "".join(f"    def {name}(self): pass\n" for name in kind.methods)
    name = write(tmp_path, f"class Mine:\n{body}") + ":Mine"
    assert not is_installed(kind, name, ())
    with pytest.raises(kind.error):
        load_plugin(kind, name, ())


def test_model_type_in_a_config_cannot_run_a_file(tmp_path: Path) -> None:
    """config.json of a downloaded model may hold any `model_type`."""
    source = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom torch.nn import Module\n"
    source += "class Mine(Module):\n    def logits(self): pass\n"
    with pytest.raises(ModelError, match="is not supported"):
        model_class(write(tmp_path, source) + ":Mine")
    assert not (tmp_path / "ran").exists()
