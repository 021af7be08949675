"""Models on this machine and on the hub: find, choose, download, list, remove. No torch."""
