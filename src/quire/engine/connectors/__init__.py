"""The moving half of KV stores: blocks between host memory and files or networks."""
