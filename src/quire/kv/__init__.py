"""Bookkeeping of KV memory: blocks, tables, prefix index and sizing. No torch, clock or I/O."""
