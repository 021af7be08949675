"""Groups of ranks (`ops/collective.py`): threads of a process, processes of a machine, and more."""
