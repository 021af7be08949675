"""Drafters, on the host or the device, that propose draft tokens for sequences."""
