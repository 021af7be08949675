"""quire and other engines on this CPU, each in an environment of its own: `make bench-cpu`."""
