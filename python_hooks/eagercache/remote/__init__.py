"""Remotes: places from which stores on many machines take kernels, and to which they give them."""
