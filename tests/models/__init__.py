"""Real models of torchvision, timm and transformers at small sizes, with and without kernels.

`zoo` makes them, `equality` compares, `__main__` is `make models`.
"""
