"""Draft models on the runner's side, and steps that verify draft tokens."""
