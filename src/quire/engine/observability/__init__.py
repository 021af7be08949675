"""Metrics, request timelines, heartbeats, the live view and the log of an engine."""
