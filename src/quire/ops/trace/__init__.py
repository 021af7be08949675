"""Forward passes as programs of the C++ core: traced once, run in one call."""
