"""`quire replay FILE`: repeat the recorded calls and compare every plan."""

import argparse

from quire.cli.options.help_parser import Commands
from quire.cli.recordings import add_recording, log_outcome
from quire.cli.settings import add_settings, given_settings


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "replay",
        usage="quire replay FILE [--with-model] [option ...]",
        help="run a recording again and compare every plan",
        description="Repeat the scheduler calls of a recording (`quire serve --record DIR`) and"
        " compare every plan, up to the first difference. With the model, which needs a recording"
        " with tokens, also compute all steps again and compare the sampled tokens. Settings"
        " replace the recorded ones.",
    )
    add_recording(parser, run)
    parser.add_argument(
        "--with-model", action="store_true", help="also run the recorded model; implied by --model"
    )
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 for a difference, another if incomplete."""
    from quire.engine.recording.files import read_recording

    segments = read_recording(arguments.file)
    settings = given_settings(arguments)
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
