"""The state of running rows as arrays, and what a step reads of it."""
