"""Quantization: the methods by which checkpoints store quantized weights, and the schemes of the weights."""
