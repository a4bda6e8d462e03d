"""Has a pool of fresh processes compute, and another Python do so too."""

import multiprocessing
import subprocess
import sys

import torch


def norm(size: int) -> float:
    """Of a ramp."""
    return round(torch.arange(float(size)).norm().item(), 3)


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(norm, [3, 5, 8]))
    code = "import torch; print(torch.ones(4).softmax(0).tolist())"
    print(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end=""
    )
