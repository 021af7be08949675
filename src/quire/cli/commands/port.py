"""`quire port DIR`: find the architecture nearest to a checkpoint of an unknown type, show the
differences, and write the beginning of a class."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options.help_parser import Commands
from quire.spec.config_fields import shown

if TYPE_CHECKING:
    from quire.tools.port.nearest import Checkpoint, Nearest, Shape


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "port",
        usage="quire port DIRECTORY [--out DIRECTORY]",
        help="write a first class for an unsupported model type",
        description="Find the supported architecture nearest to the checkpoint in DIRECTORY, by"
        " config.json and the headers of the weights. Print the differences, and write a class and"
        " its test to start from. The class rejects each field that it does not implement yet.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "directory", type=Path, metavar="DIRECTORY", help="folder of the checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIRECTORY",
        help="folder for the class and its test; existing files are kept; by default nothing is"
        " written",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from quire.tools.port.nearest import find_nearest, read_checkpoint
    from quire.tools.port.skeleton import write_skeleton

    checkpoint = read_checkpoint(arguments.directory)
    nearest = find_nearest(checkpoint)
    for line in lines(checkpoint, nearest):
        print(line)
    if arguments.out is not None:
        for path in write_skeleton(checkpoint, nearest, arguments.out):
            print(f"written: {path}")
        print(f"then: pip install -e {arguments.out}; quire verify {arguments.directory}")
    return 0


def lines(checkpoint: "Checkpoint", nearest: "Nearest") -> Iterator[str]:
    """Yield the lines of the report."""
    ours = nearest.model_type
    shared = f"{nearest.shared} of {nearest.count} tensor names are the same"
    by = shared if checkpoint.shapes else "by config.json alone, as there are no weights"
    yield f"{checkpoint.model_type} is nearest to {ours}: {by}"
    if nearest.fields:
        yield f"fields of config.json that {ours} refuses or does not read"
        for field in nearest.fields:
            yield f"  {field.name} is {shown(field.value)}"
            yield f"      {field.ours}"
    if nearest.tensors:
        yield f"tensors that {ours} has not, or has in another shape (N: numbers)"
        for each in nearest.tensors:
            times = f", {each.count} of them" if each.count > 1 else ""
            yield f"  {each.name}: {_shape(each.theirs)}, in {ours} {_shape(each.ours)}{times}"
    if nearest.is_same:
        yield "nothing differs that can be seen from outside"
    if nearest.spec_differs:
        yield (
            f"read in another way than of {ours} where the type is unknown:"
            f" {', '.join(nearest.spec_differs)}; name the type in spec/layer_windows.py and"
            " spec/config_defaults.py"
        )


def _shape(shape: "Shape | None") -> str:
    return "none" if shape is None else str(list(shape))
