"""Execution of plans on a GPU: the host launches work and never waits."""
