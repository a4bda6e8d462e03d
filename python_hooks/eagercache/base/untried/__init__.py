"""Beside a torch that nobody has tried: a look at the hooks, and waiting for a verdict."""
