"""The tree of errors.

QuireError
 +-- ConfigError          a setting or a combination of settings is wrong (also a ValueError)
 +-- RequestError         a request is wrong or cannot be served (also a ValueError)
 |    +-- EngineBusy      too many requests wait; the same request may be served later
 +-- ModelError           a model's files are missing, unreadable or of an unknown architecture
 |    +-- ModelNotFound   no such directory, and the hub did not answer or has no such model
 +-- OutOfMemory          weights, workspace or KV pool do not fit
 +-- MissingDependency    an optional package is needed; the message holds the pip command
 +-- HookFailed           an operator's hook failed on a request; other requests continue
 +-- EngineError          the engine failed while it worked on requests
      +-- StepFailed      a step failed on one request; other requests continue
      +-- EngineDead      the core's process has ended or does not answer
      +-- RankLost        another rank of the model has ended or given up
      +-- RecordingDamaged  the contents of a recording are invalid

Every message says what was wrong, the value, and what to do.
"""

# Codes of failed requests, for programs (`Failure.code`).
STEP_FAILED = "step_failed"  # a step of the engine failed on the request
REQUEST_FAILED = "request_failed"  # the request cannot be satisfied
GRAMMAR_FAILED = "grammar_failed"  # the grammar met a limit or a dead end
GRAMMAR_FAULT = "the grammar of this request cannot be followed"  # start of the message
TIMED_OUT = "timed_out"  # the request took longer than its timeout_s
# Codes of hooks' failures (`HookFailed.code`, also `Failure.code`).
HOOK_FAILED = "hook_failed"  # the hook raised, or returned an invalid value
HOOK_TIMED_OUT = "hook_timed_out"
HOOK_UNAVAILABLE = "hook_unavailable"  # too many calls of the hook hang
# Codes of rejected requests, for programs (`RequestError.code`).
WRONG_RUNNER = "wrong_runner"  # generation requested from a pooling engine, or the reverse
UNSUPPORTED = "unsupported_value"  # a field that this kind of request cannot have
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # the prompt leaves no room for an answer


class QuireError(Exception):
    """Base of all errors that the engine raises on purpose."""


class ConfigError(QuireError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class RequestError(QuireError, ValueError):
    """A request that is malformed or that this engine can never serve.

    field: name of the invalid field in the request. code: code for programs.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class EngineBusy(RequestError):
    """A valid request beyond max_num_queued_reqs; the client may try again later."""


class ModelError(QuireError):
    """A model's files cannot be used."""


class ModelNotFound(ModelError):
    """The model is neither a directory nor available from the hub."""


class OutOfMemory(QuireError):
    """The memory plan does not fit the machine."""


class MissingDependency(QuireError, ImportError):
    """An optional package is needed."""


class HookFailed(QuireError):
    """A hook failed on a request. The message is for clients; the log holds the exception."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineError(QuireError):
    """The engine failed while working."""


class StepFailed(EngineError):
    """A step failed on one request, for an unknown cause. Other requests continue."""


class EngineDead(EngineError):
    """The core's process has ended or does not respond."""


class RankLost(EngineError):
    """Another rank of the model has ended, has given up or does not respond, so ranks can no
    longer exchange data."""


class RecordingDamaged(EngineError):
    """The contents of a recording are invalid."""
