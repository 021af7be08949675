"""Rendering of chat templates, and a process for it: python -m
quire.render.templates.template_worker.

A template is untrusted code. The sandbox keeps it away from files and from Python's internals.
`job_worker.py` limits its time and memory; `InThisProcess` has no limits.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime

from quire.render.jobs.job_worker import serve_jobs
from quire.render.templates.chat_template import ChatOptions, ChatTemplate
from quire.render.templates.template_job import TemplateJob

MAX_KEPT_TEMPLATES = 8


def unpack(data: bytes) -> TemplateJob:
    """Return the job that `TemplateJob.pack` encoded."""
    parts = json.loads(data.decode("utf-8", "surrogatepass"))
    source, variables, messages, begins, continues, tools, documents, form, kwargs = parts
    options = ChatOptions(begins, continues, tools, documents, form, kwargs)
    return TemplateJob(source, variables, messages, options)


class InThisProcess:
    """Renders without limits, and caches compiled templates. now: clock for templates' dates."""

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        self._now = now
        self._compiled: dict[str, tuple[Mapping[str, str], ChatTemplate]] = {}

    def prepare(self) -> None: ...

    def render(self, job: TemplateJob) -> str:
        return self._template(job).render(job.messages, job.options)

    async def render_async(self, job: TemplateJob) -> str:
        return self.render(job)

    def _template(self, job: TemplateJob) -> ChatTemplate:
        variables, found = self._compiled.get(job.source, (None, None))
        if found is None or variables != job.variables:
            found = ChatTemplate(job.source, job.variables, self._now)
            if len(self._compiled) >= MAX_KEPT_TEMPLATES:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[job.source] = job.variables, found
        return found


def main() -> None:
    """Render conversations one after the other until the parent closes the socket."""
    templates = InThisProcess()
    serve_jobs(
        lambda data: templates.render(unpack(data)),
        "the chat template fails on this conversation",
    )


if __name__ == "__main__":
    main()
