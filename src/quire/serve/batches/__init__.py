"""Batches of requests in files, and the files."""
