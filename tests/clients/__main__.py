"""Run each client's cases in its own environment, against one server of each model.

    python -m tests.clients                     # all
    python -m tests.clients openai litellm      # these clients
    python -m tests.clients -k "tools"          # of all clients, the cases that match pytest's -k
    python -m tests.clients --write openai      # write the result into docs/results/clients.md

Exit status: 0 if all passed. The final table has a line for each case, a column for each model.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.clients.environments import CLIENTS, HERE, ROOT, python_of, variables, version_of
from tests.clients.page import Row, write
from tests.clients.random_model import write_random_model, write_seeing_model
from tests.support.processes.servers import Server
from tests.support.runner.adapters import write_demo_adapter

MODELS = ("demo", "random")
SEEING = "seeing"  # for cases with images
ADAPTED = "adapted"  # the demo model with the adapter `poems`
LIMIT_S = 600.0  # for one client's cases
NOTE_CHARS = 110

# case -> model -> "pass", "skip", or the error
Results = dict[str, dict[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("clients", nargs="*", choices=[*CLIENTS, []], help="all if absent")
    parser.add_argument("--list", action="store_true", help="print the clients' names, run none")
    parser.add_argument("--write", action="store_true", help="write docs/results/clients.md")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as of pytest")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CLIENTS))
        return 0
    if arguments.write and arguments.k:
        parser.error("--write needs all cases of a client; remove -k")
    clients = arguments.clients or CLIENTS
    for client in clients:
        python_of(client)
    found: dict[str, Results] = {}
    with running_servers() as urls:
        for client in clients:
            print(f"\n{version_of(client)}", flush=True)
            found[client], notes = run_cases(client, urls, arguments.k)
            if arguments.write:
                write([row_of(client, found[client], notes)])
    for client, results in found.items():
        print_table(client, results)
    passed, total = (sum(counted(r)[at] for r in found.values()) for at in (0, 1))
    print(f"\n{passed} of {total} cases pass")
    return int(passed < total or not total)


@contextmanager
def running_servers() -> Iterator[dict[str, str]]:
    """Yield the URL of each model's server, with /v1."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given = {"demo": ["demo"]}
        for name, write in (("random", write_random_model), (SEEING, write_seeing_model)):
            (folder / name).mkdir()
            write(folder / name)
            dummy = ["--load-format", "dummy", "--served-model-name", name]
            given[name] = [str(folder / name), *dummy]
        lora = ["--enable-lora", "--lora-modules", f"poems={write_demo_adapter(folder / 'poems')}"]
        given[ADAPTED] = ["demo", "--served-model-name", ADAPTED, *lora]
        urls = {}
        for model in (*MODELS, SEEING, ADAPTED):
            server = Server(*given[model], is_fork=False)
            stack.callback(server.stop)
            urls[model] = f"{server.url}/v1"
        yield urls


def run_cases(client: str, urls: dict[str, str], keyword: str) -> tuple[Results, tuple[str, ...]]:
    """Run a client's cases in its environment; return results and notes. A client that does not
    end in time has one failure."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        flags = [
            "-q",
            "--tb=short",
            "--no-header",
            "-c",
            HERE / "clients.ini",
            "--junit-xml",
            report,
        ]
        command = [python_of(client), "-m", "pytest", *flags, "-k", keyword]
        command.append(HERE / f"{client}_cases.py")
        try:
            subprocess.run(command, env=variables(urls), cwd=ROOT, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"(all)": {"": f"did not end in {LIMIT_S:.0f} s"}}, ()
        if not report.exists():
            return {"(all)": {"": "pytest did not run"}}, ()
        results, notes = read_report(report), read_notes(report)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return results, notes


def read_report(report: Path) -> Results:
    """Return pytest's outcomes by case and model (`` for cases with a single model)."""
    results: Results = {}
    for case in ET.parse(report).iter("testcase"):
        name, _, inside = case.get("name", "").removeprefix("test_").partition("[")
        values = inside.rstrip("]").split("-")
        model = next((value for value in values if value in MODELS), "")
        rest = [value for value in values if value and value != model]
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        outcome = "pass" if wrong is None else " ".join((wrong.get("message") or "").split())
        outcome = "skip" if case.find("skipped") is not None else outcome
        results.setdefault(" ".join([name, *rest]), {})[model] = outcome
    return results


def read_notes(report: Path) -> tuple[str, ...]:
    """Return the reasons of skipped cases, and the properties `differs` of the others."""
    tree = ET.parse(report)
    notes = [f"not tried: {each.get('message', '')}" for each in tree.iter("skipped")]
    notes += [p.get("value", "") for p in tree.iter("property") if p.get("name") == "differs"]
    return tuple(dict.fromkeys(notes))


def row_of(client: str, results: Results, notes: tuple[str, ...]) -> Row:
    """Return the row of a client; each failed case adds a note."""
    passed, total = counted(results)
    failed = [
        f"{case} fails"
        for case, by_model in results.items()
        if not {"pass", "skip"}.issuperset(by_model.values())
    ]
    return Row(client, version_of(client), total, passed, (*failed, *notes))


def counted(results: Results) -> tuple[int, int]:
    """Return the number of passed cases and of all cases, counted for each model."""
    outcomes = [outcome for by_model in results.values() for outcome in by_model.values()]
    return outcomes.count("pass"), len(outcomes) - outcomes.count("skip")


def print_table(client: str, results: Results) -> None:
    passed, total = counted(results)
    print(f"\n{version_of(client)}: {passed} of {total}")
    for case, by_model in results.items():
        shown = {
            model: outcome if outcome in ("pass", "skip") else "FAIL"
            for model, outcome in by_model.items()
        }
        cells = [
            shown.get(model, shown.get("", "") if model == MODELS[0] else "") for model in MODELS
        ]
        print(f"  {case:<40} {cells[0]:<5} {cells[1]:<5}".rstrip())
        for message in {text for text in by_model.values() if text not in ("pass", "skip")}:
            print(f"      {message[:NOTE_CHARS]}")


if __name__ == "__main__":
    sys.exit(main())
