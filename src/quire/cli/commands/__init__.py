"""Commands of `quire`, one file each."""
