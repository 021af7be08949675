"""Media that clients send: where the bytes come from, and what an operator allows."""
