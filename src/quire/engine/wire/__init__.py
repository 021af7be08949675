"""Core and clients in different processes: wire format, core server, child processes, log."""
