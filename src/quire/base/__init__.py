"""The vocabulary of the engine: types, configuration, errors, events. Imports nothing else."""
