"""Several models, as an API process sees them."""
