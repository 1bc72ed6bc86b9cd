"""Ops of gated delta net layers, which keep a matrix for each head instead of K and V for each position."""
