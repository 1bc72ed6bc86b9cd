"""GGUF checkpoints: their tensors by the names of Hugging Face checkpoints, and the values of their blocks."""
