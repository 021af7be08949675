"""`quire replay FILE`: repeat the recorded calls and compare every plan.

With `--with-policy` it compares two scheduling policies on the recorded requests instead.
"""

import argparse
import json

from quire.base.errors import ConfigError
from quire.cli.options.help_parser import Commands
from quire.cli.recordings import add_recording, log_outcome
from quire.cli.settings import add_settings, given_settings


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "replay",
        usage="quire replay FILE [--with-model | --with-policy NAME] [option ...]",
        help="run a recording again and compare every plan",
        description="Repeat the scheduler calls of a recording (`quire serve --record DIR`) and"
        " compare every plan, up to the first difference. With the model, which needs a recording"
        " with tokens, also compute all steps again and compare the sampled tokens. Settings"
        " replace the recorded ones. With another policy, predict what it would have changed.",
    )
    add_recording(parser, run)
    parser.add_argument(
        "--with-model", action="store_true", help="also run the recorded model; implied by --model"
    )
    parser.add_argument(
        "--with-policy",
        metavar="NAME",
        help="scheduling policy to compare with the recorded one: a name, or FILE.py:CLASS",
    )
    parser.add_argument(
        "--max-requests", type=int, metavar="NUMBER", help="first requests to compare policies on"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 for a difference, another if incomplete."""
    from quire.engine.recording.files import read_recording

    settings = given_settings(arguments)
    if arguments.with_policy is not None:
        if arguments.with_model or settings:
            raise ConfigError("--with-policy compares without the model; remove other settings.")
        return _compare(arguments)
    if arguments.json or arguments.max_requests is not None:
        raise ConfigError("--json and --max-requests belong to --with-policy; add it.")
    segments = read_recording(arguments.file)
    if arguments.with_model or settings:
        from quire.tools.replay_model import replay_with_model

        outcome = replay_with_model(segments, settings)
    else:
        from quire.tools.replay import replay_all

        outcome = replay_all(segments)
    status = log_outcome(outcome)
    if outcome.difference is None:
        print(outcome.summary())
        return status
    for line in outcome.difference.lines():
        print(line)
    print(f"{outcome.num_steps:,} steps before it are identical")
    return status


def _compare(arguments: argparse.Namespace) -> int:
    """Print what another policy would have changed. Return the exit status."""
    from quire.scheduler.policy.policies import make_policy
    from quire.serve.processes.progress import CountBar
    from quire.tools.simulate.compare_policies import compare_policies, lines_of
    from quire.tools.simulate.recorded import read_recorded

    limit = arguments.max_requests
    if limit is not None and limit < 1:
        raise ConfigError(f"--max-requests must be at least 1, got {limit}.")
    make_policy(arguments.with_policy)  # report a faulty one before the recording is read
    recorded = read_recorded(arguments.file)
    status = log_outcome(recorded.outcome)
    with CountBar(2 * len(recorded.requests[:limit]), "Comparing policies") as bar:
        found = compare_policies(recorded, arguments.with_policy, limit, bar.advance)
    if arguments.json:
        print(json.dumps(found.as_data(), indent=2))
    else:
        print("\n".join(lines_of(found)))
    return status
