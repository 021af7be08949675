"""Features that let prompts begin with what was computed before."""
