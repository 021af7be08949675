"""`quire batch`: send all lines of a file through the server's app, in this process.

The process starts cores of its own. The output file records the finished lines
(`serve/batches/journal.py`), so the same command resumes after any interruption.
"""

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError, EngineDead
from quire.base.settings.config import EngineConfig, ServerConfig
from quire.engine.client.fleet import client_of
from quire.engine.start.preflight import check_before_loading
from quire.engine.start.text import TextSide, build_text_side
from quire.engine.wire.child import collecting_rarely
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.serve.app import create_app
from quire.serve.batches.app_caller import AppCaller
from quire.serve.batches.input_index import InputIndex
from quire.serve.batches.journal import Journal
from quire.serve.batches.line_runner import LineOptions, LineRunner, Slots
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from quire.serve.processes.managed_core import ManagedCores
from quire.serve.processes.progress import BatchBar

logger = logging.getLogger("quire")

INTERRUPTED = 130  # exit status
LOOK_S = 0.5  # interval of checking the engine and updating the progress bar
SYNC_LOOKS = 2  # checks between two syncs of the output to disk
OPEN_PER_ROW = 2  # open lines per row: one runs while the next one is tokenised and waits


@dataclass(frozen=True)
class BatchFiles:
    """The input file and the output file of `quire batch`."""

    input: Path
    output: Path

    def check(self) -> None:
        """Raise ConfigError if the input is missing or is also the output."""
        if not self.input.is_file():
            raise ConfigError(
                f"there is no file {self.input}; give a file with one request per line."
            )
        if self.output.exists() and self.output.samefile(self.input):
            raise ConfigError(f"{self.output} is also the input; give another file for the output.")


class BatchRun:
    """One invocation of `quire batch`."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, files: BatchFiles) -> None:
        self._engine, self._server, self._files = engine, server, files
        self._num_signals = 0

    def run(self) -> int:
        """Run the unfinished lines; return the exit status. Raise QuireError if that fails."""
        self._files.check()
        source = resolve_source(self._engine.model)
        check_before_loading(self._engine, source)
        names = self._server.served_model_name or (source.name,)
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(contextlib.closing(Journal(self._files.output)))
            index = InputIndex(self._files.input, names[0], self._server.max_bytes_with_images)
            stack.enter_context(contextlib.closing(index))
            runner = LineRunner(index, journal, LineOptions(ends_with_engine=True))
            if runner.tally.num_done:
                logger.info("%d of %d lines are done already", runner.tally.num_done, len(index))
            if not runner.is_complete:
                self._run(source, names, index, journal, runner)
            return self._report_end(runner, len(index))

    def _run(
        self,
        source: ModelSource,
        names: tuple[str, ...],
        index: InputIndex,
        journal: Journal,
        runner: LineRunner,
    ) -> None:
        cores = ManagedCores(self._engine, "warning")
        try:
            cores.start()
            text = build_text_side(self._engine.model, source)
            text.renderer.prepare()
            cores.wait_until_ready()
            with collecting_rarely(), BatchBar(len(index), runner.tally) as bar:
                asyncio.run(self._answer(cores, text, names, journal, runner, bar))
        except EngineDead as error:
            raise EngineDead(f"{error} {self._resume_hint()}") from error
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"{self._files.output} cannot be written ({reason}). {self._resume_hint()}"
            ) from error
        finally:
            cores.stop()

    async def _answer(
        self,
        cores: ManagedCores,
        text: TextSide,
        names: tuple[str, ...],
        journal: Journal,
        runner: LineRunner,
        bar: BatchBar,
    ) -> None:
        client = client_of(cores.paths, text.tokenizer)
        client.start()
        await client.wait_until_ready()
        server = self._server
        api = ApiContext(client, text.renderer, text.requests, names, server, int(time.time()))
        if server.hooks:
            api.hooks = Hooks(server.hooks, server.hook_timeout)
        num_rows = client.ready.max_num_seqs * self._engine.parallel.data_parallel_size
        caller = AppCaller(create_app(api), server.api_key[0] if server.api_key else None)
        slots = Slots(OPEN_PER_ROW * num_rows)
        work = asyncio.create_task(runner.run(caller, slots, lambda: self._num_signals > 0))
        self._take_signals(work)
        num_looks = 0
        while not work.done():
            await asyncio.wait((work,), timeout=LOOK_S)
            bar.update(runner.tally)
            cores.check_progress()
            num_looks += 1
            if num_looks % SYNC_LOOKS == 0:
                await asyncio.to_thread(journal.sync)
        await client.close()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    def _take_signals(self, work: "asyncio.Task[None]") -> None:
        """Handle signals: the first one lets open lines finish, the second one cancels them."""

        def take() -> None:
            self._num_signals += 1
            if self._num_signals == 1:
                logger.info("waiting for the lines in progress; stop again to end now")
            else:
                work.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                asyncio.get_running_loop().add_signal_handler(number, take)

    def _report_end(self, runner: LineRunner, total: int) -> int:
        tally = runner.tally
        if not runner.is_complete:
            left = total - tally.num_done
            logger.info("%d of %d lines are left. %s", left, total, self._resume_hint())
            return INTERRUPTED
        logger.info(
            "%s: %d answers, %d failed; %d prompt tokens (%d cached), %d output tokens",
            self._files.output, tally.num_completed, tally.num_failed,
            tally.num_prompt_tokens, tally.num_cached_tokens, tally.num_output_tokens,
        )  # fmt: skip
        return 0

    def _resume_hint(self) -> str:
        return (
            f"Finished lines are in {self._files.output}. Run the same command again to continue."
        )
