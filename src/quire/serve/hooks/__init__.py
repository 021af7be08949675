"""Hooks of operators: created once, called with a time limit, each returned value checked."""
