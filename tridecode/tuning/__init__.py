"""Launch configurations: rules, tables of GPUs, the user's own table."""
