"""The race of guesses: the text that repeats itself, what is asked, what counts, who is faster."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.cpu.drivers import guess_llama_server, guess_quire
from benchmarks.cpu.drivers.guessing import PLAIN, Answer, Answerer, Job, Request, race
from benchmarks.cpu.engines import FLOAT16, INT8, LLAMA, Engine
from benchmarks.cpu.guess_report import Answered, fastest, summary, table
from benchmarks.cpu.guesses import RACERS, SERVER, Race, prepared
from benchmarks.cpu.preparation import Scratch
from benchmarks.cpu.repeating import PERIOD, cycle, write_repeating
from benchmarks.cpu.requests import DEMO, TASKS, demo_requests, requests_of
from benchmarks.cpu.workloads import Shape

SMALL = Shape("small", "qwen3", 128, 2, 4, 2, 32, 256, 1500)
REPEATED = next(task for task in TASKS if task.name == "repeated")


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_text_repeats_itself_and_is_guessed(tmp_path: Path, options: dict[str, str]) -> None:
    model = write_repeating(SMALL, tmp_path / "small")
    requests = requests_of(REPEATED, 1, num_tokens=2 * PERIOD)
    with guess_quire.answerers(Job(model, requests, [4], 1, 0, options)) as answerers:
        found = {line["variant"]: line for line in race_of(answerers, requests)}
    start = cycle(1).index(requests[1].prompt[-1]) + 1
    for line in found.values():
        assert line["token_ids"] == (cycle(1) * 4)[start : start + 2 * PERIOD]
    assert list(found) == [PLAIN, "ngram 4", "ngram of 2-4, 4", "suffix 24"]
    assert found[PLAIN]["metrics"]["num_tried"] == 0
    for name in list(found)[1:]:
        assert found[name]["metrics"]["num_right"] > PERIOD


def race_of(answerers: dict[str, Answerer], requests: list[Request], round_: int = 0) -> list[Any]:
    return list(race(Job(Path(), requests, [4], 1, round_, {}), answerers))


def test_variants_take_turns_and_the_first_request_does_not_count() -> None:
    asked: list[tuple[str, int]] = []

    def answerer(name: str) -> Answerer:
        def answer(request: Request) -> Answer:
            asked.append((name, request.prompt[0]))
            return Answer.of(request, [5, 6, 7], 0.5, 0, 0)

        return answer

    requests = [Request([i], 3, None) for i in range(3)]
    lines = race_of({name: answerer(name) for name in "ab"}, requests, round_=1)
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [(line["variant"], line["request"]) for line in lines] == [
        ("b", 0), ("a", 0), ("a", 1), ("b", 1),
    ]  # fmt: skip


def test_the_token_that_stops_is_timed_but_no_part_of_the_answer() -> None:
    request = Request([1], 9, stop=2)
    assert Answer.of(request, [5, 6, 2], 0.5, 0, 0).token_ids == [5, 6]
    assert Answer.of(request, [5, 6, 2], 0.5, 0, 0).num_timed == 2
    assert Answer.of(request, [5, 6, 7], 0.5, 0, 0).token_ids == [5, 6, 7]


@pytest.mark.parametrize("name", ["copying", "tools", "json"])
def test_the_demo_model_is_asked_through_its_template(name: str) -> None:
    found = demo_requests(name, 3)
    assert found == demo_requests(name, 3)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for request in found:
        text = tokenizer.decode(request.prompt, skip_special_tokens=False)
        assert text.startswith("<|im_start|>")
        assert text.endswith("<|im_start|>assistant\n")
        assert ("You can call these tools" in text) == (name == "tools")
        assert tokenizer.id_to_token(request.stop or 0) == "<|im_end|>"


OURS = Engine("ours", "16-bit", "", FLOAT16)
PEER = Engine("peer", "16-bit", "", FLOAT16, LLAMA)


def answered(
    engine: str, round_: int, variant: str, seconds: float, others: float = 0.0, token: int = 1
) -> Answered:
    metrics = {"num_timed": 10, "seconds": seconds, "num_tried": 8, "num_right": 6}
    return Answered(engine, "copying", round_, variant, 0, metrics, [token], others)


def test_a_ratio_is_to_the_plain_rate_of_the_same_round() -> None:
    runs = []
    for round_, plain_s in enumerate((1.0, 2.0, 4.0)):
        runs += [answered("ours", round_, PLAIN, plain_s)]
        runs += [answered("ours", round_, "ngram 4", plain_s / 2)]
    found = summary(runs, [OURS], TASKS)["copying"]["ours"]
    assert list(found) == [PLAIN, "ngram 4"]
    assert (found["ngram 4"]["rate"], found["ngram 4"]["ratio"]) == (10.0, 2.0)
    assert (found[PLAIN]["limit"], found["ngram 4"]["limit"]) == (1, 5)
    assert (found["ngram 4"]["num_right"], found["ngram 4"]["num_tried"]) == (18, 24)


def test_disturbed_rounds_count_only_where_there_are_no_others() -> None:
    runs = [answered("ours", 0, PLAIN, 1.0), answered("ours", 1, PLAIN, 5.0, others=0.5)]
    runs += [answered("peer", 0, PLAIN, 2.0, others=0.5)]
    found = summary(runs, [OURS, PEER], TASKS)["copying"]
    assert (found["ours"][PLAIN]["rate"], found["ours"][PLAIN]["is_quiet"]) == (10.0, True)
    assert (found["peer"][PLAIN]["rate"], found["peer"][PLAIN]["is_quiet"]) == (5.0, False)


def test_guesses_that_change_an_answer_win_nothing() -> None:
    runs = [answered("peer", 0, PLAIN, 1.0), answered("peer", 0, "lookup 4", 0.1, token=2)]
    runs += [answered("ours", 0, PLAIN, 1.0), answered("ours", 0, "ngram 4", 0.5)]
    summaries = summary(runs, [OURS, PEER], TASKS)
    assert summaries["copying"]["peer"]["lookup 4"]["num_same"] == 0
    assert fastest(summaries["copying"]["peer"]) == (PLAIN, 10.0)
    lines = table(summaries, [OURS, PEER], TASKS)
    assert "  ours (ngram 4) / best peer (peer, plain): 2.00x" in lines
    assert [line for line in lines if line.endswith("aim 2.0: met")]


def test_a_server_that_is_not_there_is_said_and_the_others_run(tmp_path: Path) -> None:
    ours = Engine("ours", "8-bit", "guess_quire", INT8)
    server = next(engine for engine in RACERS if engine.driver == SERVER)
    race = Race(argparse.Namespace(llama_server=None, small=True), Scratch(tmp_path))
    assert prepared(race, [ours, server], TASKS[:1]) == [ours]
    assert "--llama-server FILE" in race.failures[server.name]


def test_a_server_that_ends_is_not_waited_for() -> None:
    process = subprocess.Popen(["false"])
    with pytest.raises(SystemExit, match="ended with status 1"):
        guess_llama_server.wait_until_ready(guess_llama_server.free_port(), process)


def test_requests_reach_the_drivers_whole(tmp_path: Path) -> None:
    race = Race(argparse.Namespace(requests=2, tokens=8, small=True), Scratch(tmp_path))
    job = {"model": "m", "guesses": [4, 9], "threads": 1, "round": 0, "options": {}}
    job["requests"] = str(race.requests_file(REPEATED))
    found = Job.of(json.dumps(job))
    assert found.requests == requests_of(REPEATED, 2, 8)
    assert found.max_len == len(found.requests[0].prompt) + 8 + 9 + 1
