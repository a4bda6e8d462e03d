"""Real models of torchvision, timm and transformers at small sizes, with and without kernels.

`zoo` makes them, `equality` compares, `steps` trains them for long, `__main__` is `make models`.
"""
