"""Drafters: what sequences may go on with, found on the host or the device."""
