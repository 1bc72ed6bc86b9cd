"""Launch configs: rules, the tables of the package, and the user's table."""
