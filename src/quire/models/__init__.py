"""Models: shared layers, one file per architecture, weights and where they come from."""
