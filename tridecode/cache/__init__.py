"""K/V pages: where they lie, and who holds them."""
