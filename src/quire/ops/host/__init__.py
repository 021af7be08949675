"""Host CPU: the C++ core, threads and memory pages."""
