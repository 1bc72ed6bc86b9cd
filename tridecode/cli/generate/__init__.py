"""`tridecode generate`: one answer, several answers, or a file of answers."""
