"""Engines held to AVX2 on a CPU that has more: short rounds that can be stopped and resumed."""
