"""The tree of errors.

QuireError
 +-- ConfigError          a setting or a combination of settings is wrong (also a ValueError)
 +-- RequestError         a request is wrong or cannot be served (also a ValueError)
 |    +-- EngineBusy      too many requests wait already; the same one may be served later
 +-- ModelError           a model's files are missing, unreadable or of an unknown architecture
 |    +-- ModelNotFound   no such directory, and the hub did not answer or has no such model
 +-- OutOfMemory          weights, workspace or KV pool do not fit
 +-- MissingDependency    an optional package is needed; the message holds the pip command
 +-- HookFailed           a hook of the operator's failed on a request; others go on
 +-- EngineError          the engine failed while it worked on requests
      +-- StepFailed      a step failed on one request; others go on
      +-- EngineDead      the core's process has ended or does not answer
      +-- RankLost        another rank of the model is gone, or has given up
      +-- RecordingDamaged  what a recording holds makes no sense

Every message says what was wrong, the value, and what to do.
"""

# How programs tell why a request failed (`Failure.code`).
STEP_FAILED = "step_failed"  # a step of the engine failed on it
REQUEST_FAILED = "request_failed"  # what it asks for cannot be done
GRAMMAR_FAILED = "grammar_failed"  # its grammar meets a limit, or cannot go on
GRAMMAR_FAULT = "the grammar of this request cannot be followed"  # the message begins so
TIMED_OUT = "timed_out"  # it took longer than its timeout_s
# What went wrong with a hook (`HookFailed.code`, also of a `Failure`).
HOOK_FAILED = "hook_failed"  # it raised, or returned what makes no sense
HOOK_TIMED_OUT = "hook_timed_out"
HOOK_UNAVAILABLE = "hook_unavailable"  # too many of its calls hang
# Why a request was not taken (`RequestError.code`).
WRONG_RUNNER = "wrong_runner"  # the engine pools, and it asks for text; or the other way round
UNSUPPORTED = "unsupported_value"  # a field that this kind of request cannot have
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # the prompt leaves no room for an answer


class QuireError(Exception):
    """Base of all errors that the engine raises on purpose."""


class ConfigError(QuireError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class RequestError(QuireError, ValueError):
    """A request that is malformed or can never be served by this engine.

    field: what of the request is wrong, by its name there. code: for programs.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class EngineBusy(RequestError):
    """A request beyond max_num_queued_reqs. It is not wrong, only too many: try again later."""


class ModelError(QuireError):
    """A model's files cannot be used."""


class ModelNotFound(ModelError):
    """The model is neither a directory nor to be had from the hub."""


class OutOfMemory(QuireError):
    """The memory plan does not fit the machine."""


class MissingDependency(QuireError, ImportError):
    """An optional package is needed."""


class HookFailed(QuireError):
    """A hook failed on a request. The message is for clients: the log has what was raised."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineError(QuireError):
    """The engine failed while working."""


class StepFailed(EngineError):
    """A step failed on one request, which is not to blame as far as anybody knows. Others go on."""


class EngineDead(EngineError):
    """The process of the core has ended, or it does not answer any more."""


class RankLost(EngineError):
    """Another rank that computes the model, too, is gone, has given up or does not answer: what
    ranks exchange cannot be exchanged any more."""


class RecordingDamaged(EngineError):
    """What a recording holds makes no sense."""
