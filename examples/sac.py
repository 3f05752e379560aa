"""Soft actor critic: an update of critics, actor, temperature and targets, with three optimizers, is one graph."""

import argparse
import copy

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

from graphmod import CUDAGraphModule

device = "cuda" if torch.cuda.is_available() else "cpu"
STATE, ACTION, BATCH = 4, 2, 32


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def adam(parameters) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=1e-3, fused=True, capturable=True)


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    actor = mlp(STATE, 2 * ACTION).to(device)
    critics = nn.ModuleList(mlp(STATE + ACTION, 1) for _ in range(2)).to(device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    actor_adam, critic_adam, alpha_adam = adam(actor.parameters()), adam(critics.parameters()), adam([log_alpha])

    def act(state):
        mean, spread = actor(state).chunk(2, -1)
        # validate_args reads on the host whether all values are valid.
        normal = Normal(mean, spread.clamp(-5, 2).exp(), validate_args=False)
        raw = normal.rsample()
        action = raw.tanh()
        return action, (normal.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(-1, keepdim=True)

    def lowest(networks, state, action):
        return torch.minimum(*(network(torch.cat([state, action], -1)) for network in networks))

    def update(state, action, reward, following):
        with torch.no_grad():
            chosen, log_prob = act(following)
            goal = reward + 0.99 * (lowest(targets, following, chosen) - log_alpha.exp() * log_prob)
        critic_loss = sum(F.mse_loss(critic(torch.cat([state, action], -1)), goal) for critic in critics)
        critic_adam.zero_grad()
        critic_loss.backward()
        critic_adam.step()
        chosen, log_prob = act(state)
        actor_loss = (log_alpha.exp().detach() * log_prob - lowest(critics, state, chosen)).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()
        alpha_adam.zero_grad()
        (-log_alpha * (log_prob.detach() - ACTION).mean()).backward()
        alpha_adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.005)
        return critic_loss.detach(), actor_loss.detach()

    if graphs:
        update = CUDAGraphModule(update)

    losses = []
    for step in range(steps):
        batch = [torch.randn(BATCH, width).to(device) for width in (STATE, ACTION, 1, STATE)]
        losses += [loss.item() for loss in update(*batch)]
        print(f"step {step}: critic {losses[-2]:.4f}, actor {losses[-1]:.4f}")
    if graphs:
        print(update.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    main(parser.parse_args().steps)
