"""Batches: files of requests, answered through the app, for the server and for `quire batch`."""
