"""The CPU: the C++ core, threads, memory pages."""
