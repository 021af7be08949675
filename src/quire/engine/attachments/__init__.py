"""Features that attach to the loop."""
