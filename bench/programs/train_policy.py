"""An actor and a critic learn to balance poles, in many toy worlds at a time."""

from __future__ import annotations

import math

import loop
import torch
from torch import Tensor, nn

SIZES = {
    "tiny": {"worlds": 4, "moves": 4, "width": 16},
    "cpu": {"worlds": 64, "moves": 16, "width": 64},
    "cuda": {"worlds": 4096, "moves": 32, "width": 256},
}
STEPS = {"tiny": 4, "cpu": 600, "cuda": 400}


class Poles:
    """Carts with poles, as tensors; a world that ends begins anew."""

    def __init__(self, worlds: int, device: torch.device) -> None:
        self.state = torch.empty(worlds, 4, device=device).uniform_(-0.05, 0.05)
        self.age = torch.zeros(worlds, device=device)

    def move(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """(rewards, which worlds ended)."""
        x, speed, angle, turn = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        sine, cosine = angle.sin(), angle.cos()
        pushed = (force + 0.05 * turn**2 * sine) / 1.1
        turned = (9.8 * sine - cosine * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        moved = pushed - 0.05 * turned * cosine / 1.1
        state = (x + 0.02 * speed, speed + 0.02 * moved, angle + 0.02 * turn, turn + 0.02 * turned)
        self.state = torch.stack(state, dim=1)
        self.age = self.age + 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180)
        ended = fallen | (self.age >= 500)
        first = torch.empty_like(self.state).uniform_(-0.05, 0.05)
        self.state = torch.where(ended[:, None], first, self.state)
        self.age = torch.where(ended, 0.0, self.age)
        return torch.ones_like(self.age), ended


class ActorCritic(nn.Module):
    """Logits of the two moves, and the worth of a state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.body = nn.Sequential(*layers)
        self.actor, self.critic = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(state)
        return self.actor(x), self.critic(x).squeeze(-1)


def returns_of(rewards: Tensor, ended: Tensor, last: Tensor) -> Tensor:
    """Discounted sums, backwards through time."""
    found = []
    for reward, end in zip(reversed(rewards), reversed(ended), strict=True):
        last = reward + 0.99 * last * (~end)
        found.append(last)
    return torch.stack(found[::-1])


def main() -> None:
    """Learns, prints the share of worlds that ended at each turn."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size, device = program.size, program.device
    worlds = Poles(size.worlds, device)
    model = ActorCritic(size.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in program.each_step():
        rows: dict[str, list[Tensor]] = {"state": [], "action": [], "reward": [], "ended": []}
        with torch.no_grad():
            for _ in range(size.moves):
                logits, _ = model(worlds.state)
                action = torch.distributions.Categorical(logits=logits).sample()
                rows["state"].append(worlds.state)
                rows["action"].append(action)
                reward, end = worlds.move(action)
                rows["reward"].append(reward)
                rows["ended"].append(end)
            _, last = model(worlds.state)
        state, action, reward, ended = (torch.stack(row) for row in rows.values())
        wanted = returns_of(reward, ended, last)
        logits, worth = model(state)
        chosen = torch.distributions.Categorical(logits=logits)
        gain = wanted - worth.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        loss = -(gain * chosen.log_prob(action)).mean() - 0.01 * chosen.entropy().mean()
        loss = loss + 0.5 * (wanted - worth).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if program.says(step):
            loop.say(step, loss=loss, ended=ended.float().mean(), worth=worth.mean())


if __name__ == "__main__":
    main()
