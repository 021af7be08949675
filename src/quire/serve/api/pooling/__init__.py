"""Endpoints of models that pool: embeddings, classes and scores."""
