"""Ends with an exception of torch's that nobody catches."""

import torch

print("before")
torch.ones(2, 3) @ torch.ones(2, 3)
