"""Schedulers without a model: executors of random tokens, in virtual and in real time."""
