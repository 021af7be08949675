"""The steps of `quire simulate`: device, step times, workload, run, report."""

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.clock import FakeClock
from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.source import ModelSource
from quire.serve.processes.progress import CountBar
from quire.tools.bench import agents as bench_agents
from quire.tools.bench.agent_sessions import SHAPES, draw_sessions
from quire.tools.bench.load import Load
from quire.tools.bench.shown_metrics import ShownMetrics
from quire.tools.devices import Device
from quire.tools.report import plain_facts, write_report
from quire.tools.simulate.agents import AgentWork
from quire.tools.simulate.build import Engines
from quire.tools.simulate.handover import HandedOver, Link, Offered, Roles, join_legs
from quire.tools.simulate.plot import write_plot
from quire.tools.simulate.recorded import RecordedWork, is_recording, read_recorded
from quire.tools.simulate.results import Results, as_data, results_of, text_of
from quire.tools.simulate.roofline import roofline_of
from quire.tools.simulate.run import Routing, Run, run_all
from quire.tools.simulate.workload import Traced, Work, synthetic
from quire.tools.sizing.fit import Fit, fit
from quire.tools.step_fitting import Fitted, lines_of, read_fitted
from quire.tools.step_times import Roofline, StepTimes
from quire.tools.traces import read_trace

ERRORS_SHOWN = 3
DISK_BYTES_PER_S = 3e9


@dataclass(frozen=True)
class SimulationInput:
    """The engine to simulate."""

    config: EngineConfig
    source: ModelSource
    device: Device
    num_replicas: int
    roles: Roles | None = None  # division into prefill and decode replicas


@dataclass(frozen=True)
class Simulated:
    """A run with its inputs. `wall_s` is the real time that it took."""

    found: Fit
    times: StepTimes
    run: Run
    results: Results
    wall_s: float


def simulate_command(options: argparse.Namespace, simulation: SimulationInput) -> int:
    """Simulate and report. Return the exit status: 1 if no request got an answer."""
    shown_metrics = ShownMetrics.from_options(options)
    found = fit(simulation.config, simulation.source, simulation.device)
    engines = Engines.of(found, simulation.config)
    times = step_times(options, found)
    work = _work(options, simulation, found.spec.vocab_size)
    _print_head(simulation, found, work)
    disk_bytes_per_s = options.disk_gb_per_s * 1e9
    with CountBar(work.num, "Simulating", not options.disable_tqdm) as bar:
        done = simulate_work(
            engines, times, work, simulation.num_replicas, bar, simulation.roles, disk_bytes_per_s
        )
    results = results_of(done.run, shown_metrics)
    simulated = Simulated(found, times, done.run, results, done.wall_s)
    print(text_of(results, shown_metrics, work.rate_per_s), flush=True)
    data = _as_json(simulation, simulated, work)
    if isinstance(work, AgentWork):
        data["agents"] = agents = bench_agents.summary(work.outcome(done.run), bench_agents.Run())
        print(bench_agents.as_text(agents, work.num_jobs, work.num_subagents))
    _print_end(simulated)
    write_report(options.output_json, data, plain_facts)
    title, facts = f"{_title(simulation, found)}: {work.name}", _facts(simulated)
    write_plot(options.plot, title, facts, done.run, results)
    return 0 if results.serving.completed else 1


@dataclass(frozen=True)
class Done:
    """A run and the real time that it took, in seconds."""

    run: Run
    wall_s: float


def simulate_work(
    engines: Engines,
    times: StepTimes,
    work: Work,
    num_replicas: int,
    bar: CountBar,
    roles: Roles | None = None,
    disk_bytes_per_s: float = DISK_BYTES_PER_S,
) -> Done:
    """Serve a workload with `num_replicas` replicas. roles: division into prefill and decode.
    disk_bytes_per_s: rate of the directory of KV blocks, if the settings name one."""
    clock, run = FakeClock(), Run()
    if roles is None:
        disk = engines.disk(disk_bytes_per_s, clock)
        cores, cores_of = engines.replicas(num_replicas, times, clock, run, disk), None
    else:
        engines.check_stores()
        offered = Offered(len(engines.block_bytes), engines.block_size, engines.block_hash)
        work, cores_of = HandedOver(work, offered), roles.cores_of

        def link(number: int) -> Link | None:
            if number < roles.num_prefill:
                return None
            return Link(offered, engines.block_bytes, roles.link_bytes_per_s, clock)

        cores = engines.replicas(roles.num_replicas, times, clock, run, link)
    began = time.perf_counter()
    run_all(
        cores, work.arrivals(), clock, run, work.then, bar.advance,
        Routing(engines.block_size, cores_of), work.refused,
    )  # fmt: skip
    wall_s = time.perf_counter() - began
    for each in cores:
        each.close()
    join_legs(run)
    return Done(run, wall_s)


def step_times(options: argparse.Namespace, found: Fit) -> StepTimes:
    """Return the step times for the options. Raises ConfigError."""
    times: Roofline | Fitted
    if options.fit is None:
        times = roofline_of(found)
    elif is_recording(options.fit):
        times = read_recorded(options.fit).fit()
        print("\n".join([f"# step times of {options.fit}:", *lines_of(times)]))
    else:
        times = read_fitted(options.fit)
    if options.host_ms is not None:
        times = replace(times, host_s=options.host_ms / 1e3)
    return times


def _work(options: argparse.Namespace, simulation: SimulationInput, vocab_size: int) -> Work:
    rate = options.request_rate
    if options.agents is not None:
        shape, num = SHAPES[options.agents], options.num_sessions
        seed = simulation.config.model.seed
        sessions = draw_sessions(shape, num, options.scale, options.arrival_s, seed)
        return AgentWork(f"sessions of {options.agents}", sessions, vocab_size)
    if options.trace is None:
        load = Load(
            math.inf if rate is None else rate,
            options.burstiness,
            None,
            simulation.config.model.seed,
        )
        return synthetic(options, simulation.config.model, load)
    max_requests = options.num_prompts
    if is_recording(options.trace):
        recorded = read_recorded(options.trace)
        for note in recorded.outcome.notes:
            print(f"note: {note}", file=sys.stderr)
        return RecordedWork(recorded, vocab_size, rate, max_requests=max_requests)
    return Traced(read_trace(options.trace, options.trace_piece, max_requests), vocab_size, rate)


def _title(simulation: SimulationInput, found: Fit) -> str:
    """Return a description of model, device and replicas."""
    num_ranks = simulation.config.parallel.tensor_parallel_size
    ranks = f", {num_ranks} devices share each layer" if num_ranks > 1 else ""
    copies = f", {simulation.num_replicas} replicas" if simulation.num_replicas > 1 else ""
    if simulation.roles is not None:
        roles = simulation.roles
        copies = f", {roles.num_prefill} prefill and {roles.num_decode} decode replicas"
    return f"{found.model} on {found.device.name}{ranks}{copies}"


def _facts(simulated: Simulated) -> list[str]:
    """Return the lines above the charts."""
    serving, engine = simulated.results.serving, simulated.results.engine
    return [
        f"{serving.completed:,} requests in {serving.duration_s:,.1f} s,"
        f" {serving.output_throughput:,.0f} output tokens per second; prefix hits"
        f" {engine.cached:.1%}, preemptions {engine.num_preemptions:,}",
        simulated.found.memory.describe(),
    ]


def _print_head(simulation: SimulationInput, found: Fit, work: Work) -> None:
    print(f"# {_title(simulation, found)}; simulated: {work.name}")
    print(f"# {found.memory.describe()}", flush=True)


def _print_end(simulated: Simulated) -> None:
    run, wall_s = simulated.run, max(simulated.wall_s, 1e-9)
    print(
        f"# {run.duration_s:,.1f} s were simulated in {wall_s:.1f} s:"
        f" {run.num_sequence_steps / wall_s:,.0f} sequence-steps per second"
    )
    errors = list(dict.fromkeys(simulated.results.errors))
    for error in errors[:ERRORS_SHOWN]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > ERRORS_SHOWN:
        print(f"... and {len(errors) - ERRORS_SHOWN} other errors", file=sys.stderr)


def _as_json(simulation: SimulationInput, simulated: Simulated, work: Work) -> dict[str, Any]:
    rate: float | str = work.rate_per_s
    return {
        "model_id": simulated.found.model,
        "device": asdict(simulation.device),
        "tensor_parallel_size": simulation.config.parallel.tensor_parallel_size,
        "replicas": simulation.num_replicas,
        "roles": None if simulation.roles is None else asdict(simulation.roles),
        "workload": work.name,
        "num_prompts": work.num,
        "request_rate": "inf" if rate == float("inf") else rate,
        "pool_tokens": simulated.found.memory.num_slots,
        "wall_s": simulated.wall_s,
        **as_data(simulated.results),
    }
