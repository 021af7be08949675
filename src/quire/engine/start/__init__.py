"""Start of an engine from its configuration."""
