"""Trains torchvision's DeepLabV3 (MobileNetV3) to find discs, with a mask of classes."""

from __future__ import annotations

import loop
import torch
from torch.nn import functional

SIZES = {
    "tiny": {"image": 32, "batch": 2},
    "cpu": {"image": 96, "batch": 4},
    "cuda": {"image": 512, "batch": 16},
}
STEPS = {"tiny": 2, "cpu": 80, "cuda": 150}
CLASSES = 5


def scenes(batch: int, image: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with one disc each, and the class of each place: 0 beside the disc."""
    places = torch.linspace(-1, 1, image, device=device)
    centre = torch.rand(batch, 2, 1, 1, device=device) - 0.5
    distance = (places[None, :, None] - centre[:, 0]) ** 2
    distance = distance + (places[None, None, :] - centre[:, 1]) ** 2
    kind = torch.randint(1, CLASSES, (batch,), device=device)
    mask = torch.where(distance < 0.25, kind[:, None, None], 0)
    images = torch.randn(batch, 3, image, image, device=device) * 0.3
    return images + mask[:, None] / CLASSES, mask


def main() -> None:
    """Trains and prints losses and the share of places that are right."""
    program = loop.Program(__doc__, SIZES, STEPS)
    torchvision = loop.library("torchvision")
    size, device = program.size, program.device
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )
    model = model.train().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, program.steps, power=0.9)
    for step in program.each_step():
        images, mask = scenes(size.batch, size.image, device)
        with program.autocast():
            answer = model(images)
            loss = functional.cross_entropy(answer["out"], mask)
            loss = loss + 0.5 * functional.cross_entropy(answer["aux"], mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if program.says(step):
            right = (answer["out"].argmax(1) == mask).float().mean()
            loop.say(step, loss=loss, right=right)


if __name__ == "__main__":
    main()
