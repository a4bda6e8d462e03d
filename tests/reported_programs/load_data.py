"""Loads batches with worker processes."""

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Numbers and their squares."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index)).pow(2)


if __name__ == "__main__":
    total = sum(batch.sum().item() for batch in DataLoader(Squares(), batch_size=4, num_workers=2))
    print("sum", total)
