"""Plans on a GPU: the host launches, and never waits."""
