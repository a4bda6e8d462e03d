"""Looks for objects in images of several sizes with torchvision's FCOS of random weights."""

from __future__ import annotations

import loop
import torch

SIZES = {
    "tiny": {"least": 64, "most": 96, "batch": 1},
    "cpu": {"least": 128, "most": 192, "batch": 1},
    "cuda": {"least": 640, "most": 960, "batch": 8},
}
STEPS = {"tiny": 2, "cpu": 60, "cuda": 120}
# The widths of images come again and again, as those of cameras do.
WIDTHS = 4


def main() -> None:
    """Runs the detector over batches; prints how many boxes there are, and their scores."""
    program = loop.Program(__doc__, SIZES, STEPS)
    torchvision = loop.library("torchvision")
    size, device = program.size, program.device
    model = torchvision.models.detection.fcos_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=10, min_size=size.least,
        max_size=size.most, score_thresh=0.005, detections_per_img=50,
    )  # fmt: skip
    model = model.eval().to(device)
    for step in program.each_step():
        width = size.least + (step % WIDTHS) * (size.most - size.least) // WIDTHS
        images = [torch.rand(3, size.least, width, device=device) for _ in range(size.batch)]
        with torch.inference_mode():
            found = model(images)
        if program.says(step):
            scores = torch.cat([one["scores"] for one in found])
            loop.say(step, boxes=len(scores), score=scores.double().mean())


if __name__ == "__main__":
    main()
