"""Linears: matrix products with weights."""
