"""A process that puts conversations through chat templates: python -m
quire.render.templates.template_worker.

A template is foreign code. The sandbox keeps it from files and from Python's insides, not from
looping for ever or making a text that fills the memory: `job_worker.py` does.
"""

from quire.render.jobs.job_worker import serve_jobs
from quire.render.templates.template_job import InThisProcess, unpack


def main() -> None:
    """Render one conversation after the other."""
    templates = InThisProcess()
    serve_jobs(
        lambda data: templates.render(unpack(data)),
        "the chat template fails on this conversation",
    )


if __name__ == "__main__":
    main()
