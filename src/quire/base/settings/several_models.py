"""Settings of a server with several models: how many are loaded, and for how long."""

from dataclasses import dataclass

from quire.base.settings.fields import check, check_duration, setting


@dataclass(frozen=True)
class SeveralModels:
    """Loading and unloading of several models."""

    max_loaded_models: int | None = setting(
        None,
        "maximum number of models loaded at once; the least recently used one is unloaded first;"
        " by default all",
    )
    idle_unload_s: float = setting(
        0.0, "time without requests after which a model is unloaded; 0 keeps it", unit="seconds"
    )
    model_wait_s: float = setting(
        300.0, "how long a request waits for its model to load", unit="seconds"
    )

    def __post_init__(self) -> None:
        limit = self.max_loaded_models
        check(limit is None or limit >= 1, "max_loaded_models", limit, "at least 1")
        check_duration("idle_unload_s", self.idle_unload_s, "for never")
        check_duration("model_wait_s", self.model_wait_s, "to wait for no model")
