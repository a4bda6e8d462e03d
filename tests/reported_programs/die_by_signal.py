"""Ends itself by a signal, in the middle of its work."""

import os
import signal

import torch

print(torch.ones(3).sum().item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
