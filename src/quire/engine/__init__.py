"""The engine: core loop, executors, client, output processing."""
