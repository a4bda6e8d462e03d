"""Python functions: their graphs."""
