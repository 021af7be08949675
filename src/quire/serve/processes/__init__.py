"""The processes of a server, and of programs that start cores."""
