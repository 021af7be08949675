"""A server with several models."""
