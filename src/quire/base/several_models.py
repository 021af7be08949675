"""How several models of one server come and go: a part of the server's settings."""

from dataclasses import dataclass

from quire.base.config_checks import check, check_duration
from quire.base.settings import setting


@dataclass(frozen=True)
class SeveralModels:
    """Which models are loaded, and who waits for them."""

    max_loaded_models: int | None = setting(
        None,
        "of several models, how many are loaded at once: the one that was used longest ago is"
        " unloaded when another is asked for; all if absent",
    )
    idle_unload_s: float = setting(
        0.0, "unload each model that was not used for as long; 0 unloads none", unit="seconds"
    )
    model_wait_s: float = setting(
        300.0, "how long a request may wait for its model to be loaded", unit="seconds"
    )

    def __post_init__(self) -> None:
        most = self.max_loaded_models
        check(most is None or most >= 1, "max_loaded_models", most, "at least 1")
        check_duration("idle_unload_s", self.idle_unload_s, "for never")
        check_duration("model_wait_s", self.model_wait_s, "to wait for no model")
