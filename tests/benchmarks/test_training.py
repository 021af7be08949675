"""The rows of the benchmark of training."""

from benchmarks.models.training import UPDATE, rows_of


def test_only_work_that_computes_tokens_has_a_rate() -> None:
    times = {"trainer step": {"cpu_s": 2.0, "wall_s": 1.0}, UPDATE: {"cpu_s": 0.5, "wall_s": 0.5}}
    step, update = rows_of(times, 100)
    assert step == {"work": "trainer step", "cpu_s": 2.0, "wall_s": 1.0, "tokens_per_cpu_s": 50.0}
    assert update == {"work": UPDATE, "cpu_s": 0.5, "wall_s": 0.5}
