"""From a configuration to an engine."""
