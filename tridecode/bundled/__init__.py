"""The bundled chat model: weights, tokenizer and notices, as package data."""
