"""A front end of one's own on the engine's client: tokens in, tokens out, in sixty lines.

    python examples/front_end.py --port 7000
    printf 'What is 17 + 25?\n' | nc -N 127.0.0.1 7000

Each line that comes in over TCP is a prompt; its answer is streamed back, as are those of all other
connections at the same time. Who hangs up frees what the answer held. The engine runs in a process
of its own, exactly the one that `quire serve` starts.
"""

import argparse
import asyncio
import contextlib

from quire.base.errors import QuireError
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.client.remote import RemoteClient
from quire.engine.start.text import TextSide, build_text_side
from quire.models.checkpoint.source import resolve_model
from quire.serve.processes.launch import CoreProcess


class FrontEnd:
    def __init__(self, client: RemoteClient, text: TextSide) -> None:
        self.client, self.text = client, text

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a line in, an answer and an empty line out."""
        with contextlib.suppress(ConnectionError):
            while line := (await reader.readline()).decode("utf-8", "replace").strip():
                try:
                    async for piece in self.answer(line):
                        writer.write(piece.encode())
                        await writer.drain()
                except QuireError as error:
                    writer.write(f"error: {error}".encode())
                writer.write(b"\n\n")
                await writer.drain()
        writer.close()

    async def answer(self, question: str):  # type: ignore[no-untyped-def]
        """Render, send token ids to the core, and yield text as it comes."""
        prompt = self.text.renderer.render([{"role": "user", "content": question}])
        params = SamplingParams(
            temperature=0.0, max_tokens=256, output_kind=RequestOutputKind.DELTA
        )
        async for output in self.client.generate(self.text.requests.make(prompt, params)):
            yield output.outputs[0].text


async def run(config: EngineConfig, port: int) -> None:
    text = build_text_side(config.model, resolve_model(config.model.model))
    with CoreProcess(config) as core:
        client = await RemoteClient.connect(core.path, text.tokenizer)
        server = await asyncio.start_server(FrontEnd(client, text).serve, "127.0.0.1", port)
        print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int, default=7000)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(config_from_flat(model=options.model), options.port))
