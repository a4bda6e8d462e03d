"""Kernels before a program needs them: warming up, bundles."""
