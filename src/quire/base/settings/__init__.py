"""Settings of an engine and a server: frozen dataclasses with defaults, units and reasons."""
