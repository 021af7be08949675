"""Starts that need no torch: what an earlier start made of a model is kept, and mapped."""
