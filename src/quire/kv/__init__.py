"""KV memory as book-keeping: blocks, tables, prefix index, sizing. No torch, clock or I/O."""
