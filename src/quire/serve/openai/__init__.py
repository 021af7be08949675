"""Chats, completions, embeddings and scores, as OpenAI's API has them."""
