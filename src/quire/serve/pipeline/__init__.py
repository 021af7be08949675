"""From the body of a request to its response: plan, prompt, request, answer."""
