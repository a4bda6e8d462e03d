"""The compile worker: a process of its own that makes kernels, validates and times them."""
