"""`tridecode generate`: one answer, several, or a file of them."""
