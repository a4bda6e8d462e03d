"""Classifies the nodes of a graph: messages along edges, gathered with index_add."""

from __future__ import annotations

import loop
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    "tiny": {"nodes": 60, "edges": 200, "width": 16, "layers": 2},
    "cpu": {"nodes": 4000, "edges": 30_000, "width": 64, "layers": 3},
    "cuda": {"nodes": 100_000, "edges": 1_000_000, "width": 256, "layers": 3},
}
STEPS = {"tiny": 6, "cpu": 300, "cuda": 400}
CLASSES = 8


class Layer(nn.Module):
    """Each node takes the mean of gated messages of those that point to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Linear(2 * width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, degree: Tensor) -> Tensor:
        sent = self.other(x)[source]
        gate = torch.sigmoid(self.gate(torch.cat((x[target], x[source]), dim=1)))
        gathered = torch.zeros_like(x).index_add(0, target, gate * sent) / degree
        return x + functional.relu(self.norm(self.own(x) + gathered))


class Network(nn.Module):
    """Several layers and a head."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, degree: Tensor) -> Tensor:
        x = functional.relu(self.enter(x))
        for layer in self.layers:
            x = layer(x, source, target, degree)
        return self.head(x)


def main() -> None:
    """Trains on half of the nodes and prints how many of the others are right."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size, device = program.size, program.device
    labels = torch.randint(CLASSES, (size.nodes,))
    # Most edges join nodes of one class, and features say little by themselves.
    by_class = [(labels == name).nonzero().flatten() for name in range(CLASSES)]
    source = torch.randint(size.nodes, (size.edges,))
    alike = torch.rand(size.edges) < 0.7
    target = torch.randint(size.nodes, (size.edges,))
    for name, nodes in enumerate(by_class):
        chosen = (alike & (labels[source] == name)).nonzero().flatten()
        target[chosen] = nodes[torch.randint(len(nodes), (len(chosen),))]
    degree = torch.ones(size.nodes).index_add(0, target, torch.ones(size.edges))[:, None]
    features = torch.randn(size.nodes, 32) + 0.3 * torch.randn(CLASSES, 32)[labels]
    trained = torch.arange(size.nodes) % 2 == 0
    graph = [value.to(device) for value in (features, source, target, degree)]
    labels, trained = labels.to(device), trained.to(device)
    model = Network(32, size.width, size.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    for step in program.each_step():
        logits = model(*graph)
        loss = functional.cross_entropy(logits[trained], labels[trained])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if program.says(step):
            with torch.no_grad():
                right = (model(*graph).argmax(1) == labels)[~trained].float().mean()
            loop.say(step, loss=loss, right=right)


if __name__ == "__main__":
    main()
