"""Trains timm's MLP-Mixer with the parts of its own script: mixup, schedule, average of weights."""

from __future__ import annotations

import loop
import torch

SIZES = {
    "tiny": {"image": 32, "patch": 8, "layers": 2, "width": 16, "batch": 2},
    "cpu": {"image": 64, "patch": 8, "layers": 4, "width": 128, "batch": 8},
    "cuda": {"image": 224, "patch": 16, "layers": 12, "width": 768, "batch": 64},
}
STEPS = {"tiny": 4, "cpu": 250, "cuda": 200}
CLASSES = 10


def main() -> None:
    """Trains, evaluates the average, prints."""
    program = loop.Program(__doc__, SIZES, STEPS)
    loop.library("timm")
    from timm import loss as losses
    from timm import optim, scheduler, utils
    from timm.data import Mixup
    from timm.models.mlp_mixer import MlpMixer

    utils.random_seed(0)
    size, device = program.size, program.device
    model = MlpMixer(
        num_classes=CLASSES, img_size=size.image, patch_size=size.patch,
        num_blocks=size.layers, embed_dim=size.width,
    ).to(device)  # fmt: skip
    average = utils.ModelEmaV3(model, decay=0.99)
    optimizer = optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = scheduler.CosineLRScheduler(
        optimizer, t_initial=program.steps, warmup_t=max(1, program.steps // 20)
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES, label_smoothing=0.1)
    criterion = losses.SoftTargetCrossEntropy()
    colours = torch.randn(CLASSES, 3, 1, 1, device=device)
    model.train()
    for step in program.each_step():
        labels = torch.randint(CLASSES, (size.batch,), device=device)
        noise = torch.randn(size.batch, 3, size.image, size.image, device=device)
        images, wanted = mixup(noise + 0.3 * colours[labels], labels)
        with program.autocast():
            loss = criterion(model(images), wanted)
        optimizer.zero_grad()
        loss.backward()
        utils.dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        average.update(model)
        schedule.step(step + 1)
        if program.says(step):
            loop.say(step, loss=loss)
    average.module.eval()
    labels = torch.arange(CLASSES, device=device)
    images = torch.randn(CLASSES, 3, size.image, size.image, device=device) + 0.3 * colours
    with torch.inference_mode():
        answer = average.module(images)
    loop.say(program.steps, right=(answer.argmax(1) == labels).float().mean(), mean=answer.mean())


if __name__ == "__main__":
    main()
