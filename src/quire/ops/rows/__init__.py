"""State of running rows as arrays, and the inputs that a step gathers from it."""
