"""Recordings of the calls to the scheduler's four doors: frames, files, redaction."""
