"""The Responses API of OpenAI: conversations that the server stores."""
