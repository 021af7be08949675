"""Media in a runner: encoding items, and model inputs in place of their placeholder tokens."""
