"""Media in prompts: the items, and how a plan encodes and reads them."""
