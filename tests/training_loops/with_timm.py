"""A loop of timm's parts over images that are made up: `with_timm.py RESULT`.

The model, the batches (Mixup), the loss, the optimizer, clipping, the schedule and the average of
the weights are timm's; its own script is not in its wheel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy
import timm
import timm.data
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
import torch


def main() -> None:
    """Trains and writes what was found."""
    timm.utils.random_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=6, warmup_t=2)
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10, label_smoothing=0.1)
    criterion = timm.loss.SoftTargetCrossEntropy()
    clip = timm.utils.dispatch_clip_grad
    losses = timm.utils.AverageMeter()
    numpy.random.seed(0)  # Mixup's
    found: dict[str, list[float]] = {"losses": []}
    model.train()
    for step in range(6):
        images, labels = mixup(torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        clip(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        average.update(model)
        schedule.step(step + 1)
        losses.update(loss.item(), images.size(0))
        found["losses"].append(loss.item())
    average.module.eval()
    with torch.inference_mode():
        output = average.module(torch.randn(4, 3, 32, 32))
    found["evaluated"] = [losses.avg, *output.flatten().tolist()]
    found["parameters"] = [p.detach().norm().item() for p in model.parameters()]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
