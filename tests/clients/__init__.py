"""Other people's software against `quire serve`: `make test-clients`."""
