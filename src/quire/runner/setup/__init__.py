"""Steps from a configuration to a runner: memory plan, loading, assembly."""
