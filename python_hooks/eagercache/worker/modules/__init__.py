"""Whole modules: their graphs, kernels and validation."""
