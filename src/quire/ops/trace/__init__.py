"""Forward passes as programs of the C++ core: traced once, then run in one call per step."""
