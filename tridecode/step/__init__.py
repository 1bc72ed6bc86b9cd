"""Passes over the model: their lists of launches, their buffers, and their runners."""
