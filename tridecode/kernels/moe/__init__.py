"""Kernels of mixtures of experts: the router, the experts' products, and their sum."""
