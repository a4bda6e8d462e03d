"""A loop over torchvision's data, transforms and a model of its: `with_torchvision.py RESULT`.

Written like its reference script, which is not in its wheel: workers load and transform the images.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torchvision
from torchvision.transforms import v2


def loader(seed_offset: int, train: bool) -> torch.utils.data.DataLoader:
    """Batches of 4 made-up images."""
    steps = (
        [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()] if train else [v2.Resize((32, 32))]
    )
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            *steps,
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
        ]
    )
    data = torchvision.datasets.FakeData(
        24, (3, 40, 40), num_classes=10, transform=transform, random_offset=seed_offset
    )
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=train, num_workers=2)


def main() -> None:
    """Trains, evaluates, and writes what was found."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    found: dict[str, list[float]] = {"losses": []}
    model.train()
    for image, target in loader(0, train=True):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found["losses"].append(loss.item())
    schedule.step()
    model.eval()
    with torch.inference_mode():
        found["evaluated"] = [
            criterion(model(image), target).item() for image, target in loader(100, train=False)
        ]
    found["parameters"] = [p.detach().norm().item() for p in model.parameters()]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
