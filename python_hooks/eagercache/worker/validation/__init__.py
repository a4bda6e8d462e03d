"""Whether a kernel equals native."""
