"""Families of models: one file for each family, which converts config.json to a ModelSpec."""
