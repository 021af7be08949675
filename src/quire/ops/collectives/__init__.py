"""Implementations of RankGroup (`ops/collective.py`): threads, processes of a machine, torch."""
