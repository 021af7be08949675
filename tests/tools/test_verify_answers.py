"""`quire verify --answer` reproduces a server's answer to the bit, or reports where it differs.
Covers `tools/verify/answers.py`.

The server also replaces its weights here, so chats are checked for the versions of their weights.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import quire
from quire.base.errors import ConfigError
from quire.base.requests.numerics import PARTS, differing_parts, fingerprint
from quire.cli.main import main
from quire.tools.verify.answers import (
    AnswerReport,
    RecordedAnswer,
    check_model,
    compare,
    read_answer,
)
from tests.support.processes.forks import forked_children
from tests.support.processes.servers import Server

DEMO = Path(str(quire.__file__)).parent / "demo"
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "seed": 5,
    "temperature": 1, "logprobs": True, "top_logprobs": 2, "return_token_ids": True,
}  # fmt: skip
URL = "/v1/chat/completions"
HERE = {name: f"{name} here" for name in PARTS}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    server = Server("demo", "--max-model-len", "256")
    with forked_children(), httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def write(path: Path, request: Any, response: Any, **others: Any) -> Path:
    path.write_text(json.dumps({"request": request, "response": response} | others))
    return path


def test_answer_is_reproduced_and_weights_are_named(
    http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = http.post(URL, json=CHAT).json()
    assert "weights_versions" not in before["choices"][0]
    order = {"path": str(DEMO), "weights_version": "again"}
    http.post("/update_weights", json=order).raise_for_status()
    answer = http.post(URL, json=CHAT).json()
    spans = [{"first_token": 0, "version": "again"}]
    assert answer["choices"][0].pop("weights_versions") == spans
    assert answer["choices"] == before["choices"]
    assert answer["system_fingerprint"] == before["system_fingerprint"]
    lines = http.post(URL, json=CHAT | {"stream": True}).text.strip().split("\n\n")
    chunks = [json.loads(each.removeprefix("data: ")) for each in lines[:-1]]
    [last] = [each for each in chunks if "weights_versions" in each["choices"][0]]
    assert last["choices"][0]["weights_versions"] == spans and last is chunks[-1]
    assert {each["system_fingerprint"] for each in chunks} == {answer["system_fingerprint"]}

    path = write(tmp_path / "answer.json", CHAT, answer)
    settings = ["demo", "--answer", str(path)]
    assert main(["verify", *settings, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_reproduced"] and not report["differences"]
    assert "reproduced to the bit" in capsys.readouterr().out
    assert main(["verify", *settings, "--dtype", "float32"]) in (0, 1)
    assert "the formats differ from the recorded engine's; here: float32" in capsys.readouterr().out


def test_new_weights_change_the_fingerprint(http: httpx.Client, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in DEMO.iterdir():
        if file.is_file() and not file.name.startswith("__"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(DEMO / "model.safetensors")
    name = min(tensors)
    save_file(tensors | {name: tensors[name] * 1.5}, tmp_path / "model.safetensors")
    old = http.post(URL, json=CHAT).json()["system_fingerprint"]
    for folder, parts in ((tmp_path, ["weights"]), (DEMO, [])):
        http.post("/update_weights", json={"path": str(folder)}).raise_for_status()
        new = http.post(URL, json=CHAT).json()["system_fingerprint"]
        assert differing_parts(old, new) == parts


def test_report_lists_differences() -> None:
    choice = {"index": 0, "token_ids": [1, 2, 3], "logprobs": {"values": [-0.5]}, "text": "a"}
    theirs = {"id": "x", "choices": [choice], "system_fingerprint": fingerprint(HERE)}
    mine = copy.deepcopy(theirs) | {"id": "y", "new_field": 1}
    answer = RecordedAnswer(URL, CHAT, theirs)
    same = compare(answer, mine, HERE)
    assert same.is_reproduced and same.num_values == 6 and not same.parts
    mine["choices"][0]["token_ids"][2] = 4
    mine["choices"][0]["logprobs"]["values"][0] = -0.5000000000000001
    found = compare(answer, mine, HERE | {"device": "another"})
    assert not found.is_reproduced and found.parts == {"device": "another"}
    text = "\n".join(found.lines())
    assert "response.choices[0].token_ids[2] is 3 in the answer, 4 here" in text
    assert "response.choices[0].logprobs.values[0] is -0.5 " in text
    assert "the device differs from the recorded engine's; here: another" in text


def test_report_is_short_and_notes_missing_comparisons() -> None:
    long = {"choices": [{"token_ids": [0] * 100, "weights_versions": [{}, {}]}]}
    other = {"choices": [{"token_ids": [1] * 99}]}
    report: AnswerReport = compare(RecordedAnswer(URL, CHAT, long), other, HERE)
    assert len(report.differences) == 8 and "100 entries in the answer, 99 here" in str(report)
    assert "no system_fingerprint" in str(report.notes)
    of_another = long | {"system_fingerprint": "fp_1"}
    notes = compare(RecordedAnswer(URL, CHAT, of_another), other, HERE).notes
    assert "not compared" in notes[0] and "several weights" in notes[1]


@pytest.mark.parametrize(
    ("request_", "response", "reason"),
    [
        (CHAT | {"stream": True}, {"object": "chat.completion"}, "without stream"),
        (CHAT | {"seed": None}, {"object": "chat.completion"}, "no seed"),
        (CHAT, {"object": "list"}, "add url"),
        (CHAT, [], "no object 'response'"),
        (CHAT, {"object": "chat.completion"}, "no choices"),
        (CHAT, {"object": "chat.completion", "choices": []}, "no choices"),
        ("", {}, "no object 'request'"),
    ],
)
def test_unrepeatable_answers_are_refused(
    tmp_path: Path, request_: Any, response: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_answer(write(tmp_path / "answer.json", request_, response))


def test_invalid_answer_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no JSON")
    for path in (tmp_path / "text", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="cannot be read as JSON"):
            read_answer(path)
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "nested").write_text("[" * 200 + "]" * 200)
    for name in ("deep", "nested"):
        with pytest.raises(ConfigError, match="cannot be read as JSON"):
            read_answer(tmp_path / name)


def test_token_answer_has_its_seed_in_the_sampling_parameters(tmp_path: Path) -> None:
    url, response = "/inference/v1/generate", {"choices": [{"token_ids": [1]}]}
    for sampling in ({"temperature": 0}, {"seed": 3}):
        request = {"sampling_params": sampling}
        read = read_answer(write(tmp_path / "one", request, response, url=url))
        assert read.url == url and read.fingerprint is None
    for request in ({"temperature": 0}, {"seed": 3, "sampling_params": None}):
        with pytest.raises(ConfigError, match="no seed"):
            read_answer(write(tmp_path / "one", request, response, url=url))


def test_answer_without_values_is_not_reproduced() -> None:
    report = compare(RecordedAnswer(URL, CHAT, {"choices": [{}]}), {"choices": [{}]}, HERE)
    assert not report.is_reproduced and "nothing in the answer" in next(report.lines())


def test_another_model_is_refused() -> None:
    for name in (None, "org/model", "model"):
        check_model(RecordedAnswer(URL, CHAT | {"model": name}, {}), ("model", "org/model"))
    with pytest.raises(ConfigError, match=r"'adapter'.*Answers of adapters cannot be verified"):
        check_model(RecordedAnswer(URL, CHAT | {"model": "adapter"}, {}), ("model", "org/model"))
