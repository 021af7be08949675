"""Media in a runner: encoding items, and what the model reads at the place of their tokens."""
