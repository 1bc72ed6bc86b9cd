"""Tools: what a model is told of them, the calls that it writes, and what holds it to them."""
