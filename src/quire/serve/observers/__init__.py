"""Observers of the requests of an API process: usage log, rate limits and traces."""
