"""Whether a kernel is faster than native."""
