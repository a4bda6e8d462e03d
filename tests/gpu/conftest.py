"""Tests that need a GPU. Without one they are skipped, or failed where one is required."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# What these tests share with those on a CPU, and with each other.
sys.path.append(str(Path(__file__).parent.parent / "python" / "zoos"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if os.environ.get("FAIL_WITHOUT_CUDA"):
        raise pytest.UsageError("a GPU is required (FAIL_WITHOUT_CUDA) and there is none")
    for item in items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
