"""Writes bytes that are no text and leaves without what runs at exit."""

import atexit
import os
import sys

import torch

atexit.register(print, "never said")
sys.stdout.buffer.write(torch.arange(250, 256, dtype=torch.uint8).numpy().tobytes() + b"\x00\n")
sys.stdout.flush()
os._exit(5)
