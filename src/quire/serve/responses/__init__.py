"""OpenAI's Responses API: conversations that the server stores."""
