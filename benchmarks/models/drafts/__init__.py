"""Requests, records and replays of the benchmark of draft tokens."""
