"""Third-party clients against `quire serve`: `make test-clients`."""
