"""Rank processes, which compute one model together, each with its own device."""
