"""The production scheduler on a device that only a formula knows, in virtual time."""
