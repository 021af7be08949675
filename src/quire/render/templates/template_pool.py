"""Renders chat templates in worker processes, under limits that the kernel enforces.

Long conversations, and templates that came with a request, leave a process to other jobs.
"""

from dataclasses import replace

from quire.render.jobs.job_pool import MAX_PROCESSES, JobKind, JobPool, JobProcess
from quire.render.templates.template_job import TemplateJob

HEAVY_BYTES = 1 << 18
TEMPLATES = JobKind(
    module="quire.render.templates.template_worker",
    cpu_s=5.0,
    memory_bytes=512 << 20,
    answer_s=60.0,
    subject="the chat template",
    work=" on this conversation",
    advice="send less, or give another chat_template",
    waiting="conversations are waiting for the chat template",
)


_ahead = list[JobProcess]()


def prestart() -> None:
    """Start the first process of the next pool now, while the server still loads."""
    _ahead.append(JobProcess(TEMPLATES))


class TemplatePool:
    """Renders in worker processes. All methods are thread-safe and work from any event loop."""

    def __init__(self, max_processes: int = MAX_PROCESSES, cpu_s: float = TEMPLATES.cpu_s) -> None:
        idle = [_ahead.pop()] if _ahead else []
        self._jobs = JobPool(replace(TEMPLATES, cpu_s=cpu_s), max_processes, idle)

    def prepare(self) -> None:
        self._jobs.prepare()

    def render(self, job: TemplateJob) -> str:
        data = job.pack()
        return self._jobs.run(data, _is_heavy(job, data))

    async def render_async(self, job: TemplateJob) -> str:
        data = job.pack()
        return await self._jobs.run_async(data, _is_heavy(job, data))


def _is_heavy(job: TemplateJob, data: bytes) -> bool:
    return job.is_foreign or len(data) > HEAVY_BYTES
