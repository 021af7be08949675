"""Several sequences of one request, and draft tokens."""
