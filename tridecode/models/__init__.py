"""Families of models: one file a family, from config.json to a specification."""
