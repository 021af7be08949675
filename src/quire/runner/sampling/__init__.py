"""Sampling parameters of rows, and the choice of a step's tokens."""
