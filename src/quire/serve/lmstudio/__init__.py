"""Routes of LM Studio's REST API, below /api/v0/."""
