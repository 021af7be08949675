"""Clients: requests go to a core, outputs come back as text."""
