"""Refuses its arguments, as argparse does."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, required=True)
print(torch.randn(1).shape)
parser.parse_args(["--size", "many"])
