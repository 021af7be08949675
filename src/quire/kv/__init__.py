"""KV memory as book-keeping: blocks, tables, prefix index, sizing. Pure: no torch, no clock, no I/O."""
