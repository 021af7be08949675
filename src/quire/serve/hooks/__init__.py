"""Hooks of operators: made once, called with a time limit, each answer checked."""
