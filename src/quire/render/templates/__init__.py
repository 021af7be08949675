"""Conversations to text, by the chat templates of models."""
