"""The model of the C++ service, in Python: `model.py WEIGHTS [DEVICE]` writes its weights, runs it.

Run it under eagercache, and the kernels that the service's calls need are compiled: the same
operators, on the same dtypes and sizes, with the same number of threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

FEATURES = 16
CLASSES = 4


def make_weights() -> list[torch.Tensor]:
    """Scale and shift of the normalization, and the matrix: float32."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.rand(FEATURES, generator=generator),
        torch.rand(FEATURES, generator=generator),
        torch.randn(CLASSES, FEATURES, generator=generator),
    ]


def classify(features: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Each class's probability, (1, CLASSES), of features (1, FEATURES). As service.cc has it."""
    scale, shift, matrix = weights
    normal = torch.nn.functional.layer_norm(features, (FEATURES,), scale, shift)
    return torch.softmax(torch.mm(torch.nn.functional.silu(normal), matrix.t()), -1)


def main() -> None:
    """The command line."""
    weights = make_weights()
    with Path(sys.argv[1]).open("wb") as file:
        for tensor in weights:
            file.write(tensor.numpy().tobytes())
    # A kernel is for a number of threads. The service answers each request on one.
    torch.set_num_threads(1)
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    weights = [tensor.to(device) for tensor in weights]
    with torch.inference_mode():
        for step in range(20):
            classify(torch.full((1, FEATURES), float(step)).to(device), weights)


if __name__ == "__main__":
    main()
