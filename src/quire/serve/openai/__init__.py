"""Routes of OpenAI's API: chats, completions, embeddings and scores."""
