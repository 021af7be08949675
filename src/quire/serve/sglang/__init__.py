"""Routes of SGLang's server."""
