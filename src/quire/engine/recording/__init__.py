"""Recordings of the calls through the scheduler's doors: frames, files, redaction."""
