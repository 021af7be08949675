"""Chats and completions, as OpenAI's API has them."""
