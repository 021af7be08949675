"""One small program per engine: loads a model, runs one workload, prints one JSON line per run.

They run in the engine's environment, so they import nothing of quire (but for quire's own), and of
this package only what needs the standard library alone.
"""
