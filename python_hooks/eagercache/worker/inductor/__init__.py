"""Code generation: Inductor's text made into shared objects and launch plans."""
