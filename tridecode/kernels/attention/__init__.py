"""Attention of decode and prompt passes, and the K/V cache."""
