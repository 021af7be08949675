"""Executors, which run plans in the caller's thread, on a device thread, or launched ahead."""
