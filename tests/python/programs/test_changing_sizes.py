"""Programs whose sizes keep changing: few compiles, and none for what comes once."""

from __future__ import annotations

import pytest
from conftest import Program

# Requests that are made whatever calls cost (runtime_budget.cc), and some that calls have paid for.
# It is one number for all operators of a program: one that can have no kernel for many sizes may
# use most of it.
MOST = 60

BEFORE = """
import collections, random
import torch, eagercache
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
F = nn.functional
torch.set_num_threads(1)
torch.manual_seed(0)
"""
LOOPS = {
    "a loop over random sizes": """
def run():
    choose = random.Random(1)
    for _ in range(150):
        x = torch.full((choose.randint(2, 60), choose.randint(2, 300)), 0.5)
        y = F.gelu(x) * torch.sigmoid(x)
        yield F.layer_norm(y, y.shape[1:]).std() + y.sum()
""",
    "batches with a smaller last one": """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(107, 24), torch.randint(0, 5, (107,)))
def run():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        for x, y in DataLoader(data, batch_size=16):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
""",
    "a network over trees": """
leaf, join = nn.Embedding(50, 32), nn.Linear(64, 96)
def value(tree):
    if isinstance(tree, list):
        one, other = (value(part) for part in tree)
        gate, new, out = join(torch.cat((one, other), dim=-1)).chunk(3, dim=-1)
        return torch.sigmoid(gate) * torch.tanh(new) + torch.sigmoid(out) * (one + other)
    return leaf(torch.tensor(tree))
def grow(choose, depth):
    if depth == 0 or choose.random() < 0.2:
        return [choose.randrange(50) for _ in range(choose.randint(1, 9))]
    parts = [grow(choose, depth - 1) for _ in range(2)]
    return parts
def numbers(tree):  # leaves are rows of as many words as the first one has
    count = choose_count(tree)
    def cut(part):
        if isinstance(part[0], list):
            return [cut(one) for one in part]
        return tuple((part * 9)[:count])
    return cut(tree)
def choose_count(tree):
    while isinstance(tree[0], list):
        tree = tree[0]
    return len(tree)
def run():
    choose = random.Random(2)
    with torch.no_grad():
        for _ in range(30):
            tree = numbers(grow(choose, 4))
            yield value(tree if isinstance(tree, list) else [tree, tree]).mean()
""",
    "lengths in buckets": """
words, attend = nn.Embedding(90, 32), nn.MultiheadAttention(32, 2, batch_first=True)
norm, head = nn.LayerNorm(32), nn.Linear(32, 90)
def run():
    choose = random.Random(4)
    with torch.no_grad():
        for _ in range(60):
            length = choose.choice((16, 32, 48, 64, 96))
            ids = torch.arange(choose.randint(1, 6) * length).view(-1, length) % 90
            x = words(ids)
            x = norm(x + attend(x, x, x, need_weights=False)[0])
            yield F.softmax(head(F.silu(x)), dim=-1).max()
""",
    "images of random sizes": """
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, stride=2),
                    nn.Hardswish(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)).eval()
def run():
    choose = random.Random(5)
    with torch.no_grad():
        for _ in range(80):
            image = torch.full((1, 3, choose.randint(20, 70), choose.randint(20, 70)), 0.25)
            image = (image - image.mean()) / (image.std() + 1.0)
            yield net(image).softmax(-1).max()
""",
}
AFTER = """
seen = collections.Counter()
def key(op, overload, sizes):
    return op, overload, tuple(tuple(row) for row in sizes)
class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        sizes = [one.shape for one in args if isinstance(one, torch.Tensor)]
        seen[key(schema.name, schema.overload_name, sizes)] += 1
        return func(*args, **(kwargs or {}))
def answers():
    return torch.stack([one.detach() for one in run()])
with Count():
    answers()
expected = answers()
def same():
    return torch.allclose(answers(), expected, rtol=1e-4, atol=1e-6)
eagercache.enable()
right = same()
eagercache.wait(300)
once = []
for kernel in eagercache.kernels():
    if kernel.decision != "kernel":
        continue  # native may have won for a class, in the name of one of its forms
    tensors = [one["sizes"] for one in kernel.call["args"] if one["kind"] == "tensor"]
    if kernel.facts.get("form") != "shapes" and seen[key(kernel.op, kernel.overload, tensors)] == 1:
        once.append(str(kernel))
first = eagercache.stats().compiles
right = same() and right
eagercache.wait(300)
right = same() and right
stats = eagercache.stats()
of_one = collections.Counter(f"{k.op}.{k.overload}" for k in eagercache.kernels())
report(right=right, first=first, compiles=stats.compiles, failures=stats.failures, hits=stats.hits,
       kinds=len(seen), unique=sum(count == 1 for count in seen.values()), once=once,
       of_one=of_one.most_common(6), outstanding=stats.outstanding,
       failed=[k.reason for k in eagercache.kernels() if k.decision == "failed"])
"""


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_few_kernels_are_compiled_and_none_for_what_comes_once(program: Program, name: str) -> None:
    seen = program(BEFORE + LOOPS[name] + AFTER, fills=True, timeout=700)
    assert seen["right"]
    assert seen["once"] == []
    # A proof may refuse a kernel, and native answers; nothing else may fail.
    assert all("allowed" in why or "on one side alone" in why for why in seen["failed"])
    assert 0 < seen["compiles"] <= MOST, seen["of_one"]
    assert seen["hits"] > 0
