"""Processes of a server, and cores for programs that embed the engine."""
