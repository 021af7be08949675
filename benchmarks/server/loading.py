"""Measure the time and the memory of loading a checkpoint of random weights for a CPU.

    python -m benchmarks.server.loading --model shape:qwen3-1.7b

The files are in the page cache. Each round runs fresh processes. The limit reads all bytes into
fresh memory, by one thread and by two. The other one loads the model and packs it for products.
Right before each, as much memory is written and freed. A virtual machine may have to request memory
from its host, which takes several times as long as reading. The host takes it back within seconds.

Peak: the peak of memory that is not a page of a file, above the process's earlier memory. Loading
itself uses the part above the weights' own size.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.result_files import Row, columns, options_of, write
from quire.models.checkpoint.source import resolve_model
from quire.models.outline import outline
from quire.spec.model_spec import load_spec
from quire.tools.report import benchmark_parser, print_head

AIMS = {"speed": 0.8, "peak": 0.1}
FILE_BYTES = 2 << 30
WARM_UP = """
import sys
from pathlib import Path
import torch
from quire.ops.host.host_memory import passing_memory
files = sorted(Path(sys.argv[1]).glob("*.safetensors"))
def warm_up():
    for _ in range(2):
        passing_memory((5 * sum(each.stat().st_size for each in files) // 4,), torch.uint8).fill_(1)
"""
READ = (
    WARM_UP
    + """
import os, threading, time
from queue import Empty, SimpleQueue
PIECE = 64 << 20
pieces = SimpleQueue()
warm_up()
began = time.perf_counter()
for file in files:
    size = file.stat().st_size
    memory, source = passing_memory((size,), torch.uint8).numpy(), os.open(file, os.O_RDONLY)
    for begin in range(0, size, PIECE):
        pieces.put((source, begin, memoryview(memory[begin : begin + PIECE])))
def read():
    try:
        while True:
            source, begin, out = pieces.get_nowait()
            while len(out):
                count = os.preadv(source, [out], begin)
                begin, out = begin + count, out[count:]
    except Empty:
        pass
threads = [threading.Thread(target=read) for _ in range(int(sys.argv[2]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('{"seconds": %f}' % (time.perf_counter() - began))
"""
)
LOAD = (
    WARM_UP
    + """
import json, threading, time
from quire.spec.model_spec import load_spec
from quire.models.load.loading import load_model
from quire.models.load.packing import model_bytes
from quire.ops.weights.formats import core_packing
def own_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10
folder = Path(sys.argv[1])
spec, device = load_spec(folder), torch.device("cpu")
core_packing("bfloat16")
warm_up()
before, peak, is_over, progress = own_bytes(), 0, threading.Event(), []
def watch():
    global peak
    while not is_over.wait(0.01):
        peak = max(peak, own_bytes() - before)
watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter()
model = load_model(folder, spec, torch.bfloat16, device, progress=lambda *at: progress.append(at))
seconds = time.perf_counter() - began
is_over.set()
watcher.join()
weights = model_bytes(model)
print(json.dumps({"seconds": seconds, "peak": peak, "weights": weights, "reports": len(progress)}))
"""
)


def write_checkpoint(model: str, folder: Path) -> int:
    """Write random bfloat16 weights in files of at most 2 GiB. Returns their bytes."""
    config = resolve_model(model).directory / "config.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    torch.manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    left = FILE_BYTES
    for part in outline(load_spec(folder)).parts:
        for name, shape in part.tensors.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
            if tensor.nbytes > left:
                files.append({})
                left = FILE_BYTES
            files[-1][name] = tensor
            left -= tensor.nbytes
    files_by_tensor = {}
    for number, tensors in enumerate(files):
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file)
        files_by_tensor |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": files_by_tensor})
    )
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run(program: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    num_bytes = write_checkpoint(options.model, folder)
    print(f"{num_bytes / 1e9:.2f} GB in the page cache; GB/s, of each round")
    ways = {
        "read, 1 thread": (READ, "1"), "read, 2 threads": (READ, "2"), "loaded and packed": (LOAD,),
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(-1, options.rounds):
        for name, (program, *arguments) in ways.items():
            result = run(program, str(folder), *arguments)
            if number >= 0:
                found[name].append(result)
    speeds = {name: [num_bytes / 1e9 / each["seconds"] for each in found[name]] for name in ways}
    for name, own in speeds.items():
        print(f"{name:20} median {statistics.median(own):6.2f}   best {max(own):6.2f}")
    alone, together, loaded = (statistics.median(own) for own in speeds.values())
    last = found["loaded and packed"][-1]
    above = max(each["peak"] for each in found["loaded and packed"]) / last["weights"] - 1
    of_one, of_two = loaded / alone, loaded / together
    print(f"of one reading thread: {of_one:.2f} (aim {AIMS['speed']}), of two: {of_two:.2f}")
    size = f"{last['weights'] / 1e9:.2f} GB"
    print(f"peak above the weights' {size}: {above:.1%} (aim {AIMS['peak']:.0%})")
    print(f"progress was told {last['reports']:.0f} times")
    return {"bytes": num_bytes, "gb_per_s": speeds, "rounds": found, "peak_above": above}


def rows_of(found: dict[str, Any]) -> list[Row]:
    """Return one row for each way, with the figures of all rounds."""
    return [
        {"way": way, "gb_per_s": speeds, "rounds": columns(found["rounds"][way])}
        for way, speeds in found["gb_per_s"].items()
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-1.7b")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_head(f"Loading {options.model} in bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
    settings = options_of(options) | {"bytes": found["bytes"], "peak_above": found["peak_above"]}
    write(options.output_json, "server.loading", rows_of(found), settings)


if __name__ == "__main__":
    main()
