"""Scheduler: two counters per sequence, four doors. Pure: no torch, no clock, no I/O."""
