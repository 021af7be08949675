"""Images and videos of a prompt: decoding, preprocessing, placeholder tokens. No torch."""
