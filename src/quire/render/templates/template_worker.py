"""A process that renders chat templates: python -m quire.render.templates.template_worker.

A template is untrusted code. The sandbox keeps it away from files and from Python's internals.
`job_worker.py` limits its time and memory.
"""

from quire.render.jobs.job_worker import serve_jobs
from quire.render.templates.template_job import InThisProcess, unpack


def main() -> None:
    """Render conversations one after the other until the parent closes the socket."""
    templates = InThisProcess()
    serve_jobs(
        lambda data: templates.render(unpack(data)),
        "the chat template fails on this conversation",
    )


if __name__ == "__main__":
    main()
