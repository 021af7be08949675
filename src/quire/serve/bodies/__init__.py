"""Bodies of requests: the fields that clients may send, and what each field sets."""
