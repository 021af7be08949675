"""Count the instructions of ARM's products under emulation, where no such machine is at hand.

    python -m benchmarks.kernels.instructions [--rows 1 4 16 64]

It needs Debian's and Ubuntu's g++-aarch64-linux-gnu and qemu-user. A product has 128 outputs and
1,024 inputs. The table counts all instructions for 1,000 multiply-adds, with the rounding of
activations. The minimum is the number of multiply-add instructions alone. Time also depends on
memory and on how many instructions start at once, which emulation does not show.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.result_files import Row, options_of, write
from quire.ops.weights.formats import FORMATS
from quire.tools.report import benchmark_parser, print_head

ROOT = Path(__file__).parents[2]
CSRC, CHECKS = ROOT / "csrc", ROOT / "tests" / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wno-psabi", "-pthread"]
SIZE = 128 * 1024  # weights of a product
FEW, MANY = 1, 3  # products, whose difference has no packing in it


@dataclass(frozen=True)
class Variant:
    """multiply_adds: of one instruction, in floats, in 16-bit floats and in integers."""

    name: str
    number: int
    cpu: str
    multiply_adds: tuple[int, int, int]

    def minimum(self, format: str) -> float:
        """Return the instructions that 1,000 multiply-adds need."""
        return 1000 / self.multiply_adds[{"float32": 0, "float16": 0, "bfloat16": 1}.get(format, 2)]


VARIANTS = (
    Variant("neon", 1, "cortex-a53", (4, 4, 8)),  # fmla, fmla, smlal
    Variant("neon_dotprod", 2, "neoverse-n1", (4, 4, 16)),  # fmla, fmla, sdot
    Variant("neon_i8mm", 3, "max", (4, 16, 32)),  # fmla, bfmmla, smmla
)


def build(folder: Path) -> tuple[Path, Path]:
    """Compile the program for ARM and the plugin that counts, and return their paths."""
    sources = [*sorted(CSRC.glob("linear*.cpp")), CSRC / "parallel.cpp", CSRC / "variants.cpp"]
    program, plugin = folder / "multiply_once", folder / "count.so"
    given = [str(path) for path in (*sources, CHECKS / "multiply_once.cpp")]
    command = [COMPILER, *FLAGS, "-static", f"-I{CSRC}", *given, "-o", str(program)]
    subprocess.run(command, check=True)
    counting = str(CHECKS / "count_instructions.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", counting, "-o", str(plugin)], check=True)
    return program, plugin


def counted(variant: Variant, format: str, rows: int, times: int, built: tuple[Path, Path]) -> int:
    """Run the program and return its instructions."""
    program, plugin = map(str, built)
    work = [str(number) for number in (variant.number, FORMATS.index(format), rows, times)]
    command = [EMULATOR, "-cpu", variant.cpu, "-plugin", plugin, program, *work]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^instructions (\d+)$", done.stderr, re.MULTILINE)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return int(found[1])


def row_of(variant: Variant, format: str, rows: int, built: tuple[Path, Path]) -> Row:
    """Return the instructions of a product of so many rows."""
    few, many = (counted(variant, format, rows, times, built) for times in (FEW, MANY))
    per_1000 = 1000 * (many - few) / (MANY - FEW) / (rows * SIZE)
    minimum = variant.minimum(format)
    return {
        "variant": variant.name, "format": format, "rows": rows,
        "instructions_per_1000": per_1000, "min_per_1000": minimum, "share": minimum / per_1000,
    }  # fmt: skip


def table(rows: list[Row]) -> list[str]:
    """Return a line for each variant and format, with a column for each number of rows."""
    sizes = list(dict.fromkeys(row["rows"] for row in rows))
    lines = [f"{'variant':<14} {'format':<10} {'min':>7}" + "".join(f"{n:>16}" for n in sizes)]
    for name, format in dict.fromkeys((row["variant"], row["format"]) for row in rows):
        own = [row for row in rows if (row["variant"], row["format"]) == (name, format)]
        cells = (f"{row['instructions_per_1000']:.0f} ({row['share']:.0%})" for row in own)
        minimum = own[0]["min_per_1000"]
        lines.append(f"{name:<14} {format:<10} {minimum:7.0f}" + "".join(f"{c:>16}" for c in cells))
    return lines


def options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    return parser.parse_args()


def main() -> None:
    given = options()
    print_head("instructions for 1,000 multiply-adds (share that multiplies), by number of rows")
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        rows = [
            row_of(variant, format, num_rows, built)
            for variant in VARIANTS
            for format in given.formats
            for num_rows in given.rows
        ]
    print("\n".join(table(rows)))
    write(given.output_json, "kernels.instructions", rows, options_of(given))


if __name__ == "__main__":
    main()
