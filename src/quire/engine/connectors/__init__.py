"""Connectors of KV stores, which move blocks between host memory and files or networks."""
