"""Code generation for CUDA."""
