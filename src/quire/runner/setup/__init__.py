"""From a configuration to a runner: memory plan, load, assembly."""
