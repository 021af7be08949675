"""The version of this package."""

QUIRE_VERSION = "0.1.0"
