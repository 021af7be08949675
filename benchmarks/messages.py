"""What a token costs on its way from the core to a reader, by the number of rows that decode.

    python benchmarks/messages.py [--rows 256 1024 4096]

The path of `quire serve`, in one thread and without sockets. In the core's process: schedule,
update, messages (engine/news.py), write and encode (the message of the step). In the API's: decode,
read (one output per sequence), process and text (OutputProcessor, without and with a tokenizer),
put (the mailboxes). Medians of steps in which every row gets a token and nothing else, in
milliseconds of this thread's own time, which other programs disturb little; `us/token` is what the
API's process does, with text. The device takes no time.
"""

import time
from typing import Any

from async_scheduling import NUM_WARM, Parts, make_core, make_requests, timing

from quire.base.messages import StepMessage
from quire.base.sampling_params import RequestOutputKind
from quire.engine.mailbox import Mailbox
from quire.engine.news import StepReader, StepWriter
from quire.engine.output import OutputProcessor
from quire.engine.wire import LENGTH, client_codec, core_codec
from quire.models.source import resolve_model
from quire.render.tokenizer import Tokenizer
from quire.serve.child import collecting_rarely
from quire.tools.report import benchmark_parser, print_head, write_report

CORE = ("schedule", "update", "messages", "write", "encode")
CLIENT = ("decode", "read", "process", "text", "put")


class Client:
    """The API's side: what it follows, with or without text."""

    def __init__(self, tokenizer: Any) -> None:
        self.outputs, self.tokenizer = OutputProcessor(), tokenizer
        self.boxes: dict[str, Mailbox] = {}

    def add(self, request: Any) -> None:
        self.outputs.add(request, None, self.tokenizer, 0.0)
        self.boxes[request.request_id] = Mailbox(deltas=True)

    def put(self, ready: list[Any]) -> None:
        boxes = self.boxes
        for output in ready:
            boxes[output.request_id].put(output)

    def empty(self) -> None:
        """The readers have taken everything."""
        for box in self.boxes.values():
            box._outputs.clear()


def measure(num_rows: int, num_steps: int) -> dict[str, Any]:
    core = make_core(num_rows, 1, 0.0, num_steps)
    tokenizer = Tokenizer.from_directory(resolve_model("demo").directory)
    plain, with_text = Client(None), Client(tokenizer)
    for request in make_requests(num_rows, core.limits.max_model_len):
        request.params.output_kind = RequestOutputKind.DELTA
        core.add(request)
        plain.add(request)
        with_text.add(request)
    writer, reader = StepWriter(num_rows, lambda name: 0), StepReader()
    parts = Parts(time.thread_time)
    there, here = core_codec(), client_codec()
    write, encode = parts.timed("write", writer.write), parts.timed("encode", there.encode)
    decode, read = parts.timed("decode", here.decode), parts.timed("read", reader.read)
    process = parts.timed("process", plain.outputs.process)
    process_text = parts.timed("text", with_text.outputs.process)
    put, num_bytes, taken = parts.timed("put", plain.put), 0, 0
    with timing(core, parts), collecting_rarely():
        while taken < NUM_WARM + num_steps:
            news = core.advance()
            if not news:
                continue
            taken += 1
            if taken == NUM_WARM:
                for spans in parts.ms.values():
                    spans.clear()
            data = encode(write(news)[0])
            num_bytes = len(data)
            message = decode(data[LENGTH.size :])
            assert isinstance(message, StepMessage)
            outputs = read(message)
            ready, _ = process(outputs, 1.0)
            process_text(outputs, 1.0)
            put(ready)
            plain.empty()
            assert taken < NUM_WARM or len(ready) == num_rows
    core.close()
    found = parts.medians()
    behind = sum(found[part] for part in CLIENT if part != "process")
    return {
        "rows": num_rows,
        "ms": found,
        "bytes": num_bytes,
        "us_per_token_of_client": behind / num_rows * 1e3,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=100, help="that are counted")
    options = parser.parse_args()
    print_head("milliseconds of a step's messages; every row gets one token")
    names = "".join(f"{name:>9}" for name in (*CORE, *CLIENT))
    print(f"{'rows':>6}{names}{'bytes':>9}{'us/token':>9}")
    results = []
    for num_rows in options.rows:
        result = measure(num_rows, options.steps)
        values = "".join(f"{result['ms'].get(name, 0.0):9.3f}" for name in (*CORE, *CLIENT))
        rate = result["us_per_token_of_client"]
        print(f"{num_rows:>6}{values}{result['bytes']:>9}{rate:9.2f}", flush=True)
        results.append(result)
    write_report(options.output_json, {"results": results})


if __name__ == "__main__":
    main()
