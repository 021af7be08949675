"""Settings of `quire serve` for images in requests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.settings.fields import check, json_object, setting

MAX_IMAGES = 16  # default limit of images per request
KINDS = ("image", "video", "audio")  # kinds that vLLM's flag accepts


@dataclass(frozen=True)
class ServerMedia:
    """Allowed sources of images, and the number of images per request."""

    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "hosts that `https:` image URLs may name; `.example.org` also allows all hosts below it;"
        " by default none",
    )
    allowed_local_media_path: str | None = setting(
        None, "directory whose images `file:` URLs may name; by default none", is_path=True
    )
    limit_mm_per_prompt: str | None = setting(
        None, 'maximum number of images in a request, as JSON such as `{"image": 4}`; by default 16'
    )
    max_media_bytes: int = setting(
        64 << 20,
        "maximum size of all images of a request, in addition to `--max-body-bytes`",
        unit="bytes",
    )

    def __post_init__(self) -> None:
        domains = tuple(name.strip().lower() for name in self.allowed_media_domains)
        is_name = all(name.strip(".") and not set(name) & set("/:@* ") for name in domains)
        rule = "host names without scheme and port, such as example.org or .example.org"
        check(is_name, "allowed_media_domains", self.allowed_media_domains, rule)
        object.__setattr__(self, "allowed_media_domains", domains)
        if self.allowed_local_media_path == "":  # vLLM's value for none
            object.__setattr__(self, "allowed_local_media_path", None)
        check(
            self.max_media_bytes >= 1024, "max_media_bytes", self.max_media_bytes, "at least 1024"
        )
        if isinstance(self.limit_mm_per_prompt, Mapping):
            given = json.dumps(self.limit_mm_per_prompt)
            object.__setattr__(self, "limit_mm_per_prompt", given)
        self.max_images  # noqa: B018  (validates the value)

    @property
    def max_images(self) -> int:
        """Return the maximum number of images per request. Raises ConfigError."""
        name = "limit_mm_per_prompt"
        given = json_object(name, self.limit_mm_per_prompt)
        for kind, value in given.items():
            number = value.get("count") if isinstance(value, dict) else value  # vLLM takes both
            if kind not in KINDS or type(number) is not int or number < 0:
                raise ConfigError(
                    f"{name} must give numbers from 0 on to {', '.join(KINDS)}, got"
                    f" {kind!r}: {value!r}."
                )
        found = given.get("image", MAX_IMAGES)
        number = found["count"] if isinstance(found, dict) else found
        assert isinstance(number, int)
        return number
