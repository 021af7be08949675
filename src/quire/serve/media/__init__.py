"""Media of clients: the sources of their bytes, and what an operator allows."""
