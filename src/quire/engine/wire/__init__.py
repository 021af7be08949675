"""A core and its clients in different processes: messages, the server, child processes."""
