"""Modules and functions: what they are, what they read, and how they travel to a worker."""
