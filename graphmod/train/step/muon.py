"""Muon for matrices and AdamW for everything else, as one optimizer that a graph can hold."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmod import torch_private

# The defaults of torch.optim.Muon.
_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


class MuonWithAdamW(torch.optim.AdamW):
    """Steps parameter groups with `muon=True` as `torch.optim.Muon` does, and the others as AdamW.

    torch's own takes the learning rate from the device to the host, which no graph can. Here its arithmetic gives the
    direction, and what follows stays on the device. Steps are scaled so that learning rates and weight decay suited to
    AdamW suit Muon too (`adjust_lr_fn="match_rms_adamw"`). An update that `found_inf` blocks changes nothing.

    Args:
        groups: each with `muon`, `lr` (0-d float32, on the device), `weight_decay`; those with `muon=True` with
            `momentum` and `nesterov` too, and matrices only.
        settings: of AdamW.

    Raises:
        ValueError: a parameter of a Muon group is no matrix.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        for group in groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.dim() != 2:
                    raise ValueError(f"Muon takes matrices only, got a parameter of shape {tuple(parameter.shape)}")
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """One step of all groups. `closure` must be None."""
        if closure is not None:
            raise ValueError("MuonWithAdamW.step takes no closure; compute the gradients before it")
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        blocked = getattr(self, "found_inf", None)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                state["step"] = torch.zeros((), device=parameter.device)  # AdamW looks for one when it is loaded
            buffer, direction = state["momentum_buffer"].clone(), torch.zeros_like(parameter)
            torch_private.muon(
                [direction],
                [parameter.grad],
                [buffer],
                lr=1.0,
                weight_decay=0.0,
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                ns_coefficients=_COEFFICIENTS,
                ns_steps=_ITERATIONS,
                eps=_EPS,
                adjust_lr_fn="match_rms_adamw",
                has_complex=False,
            )
            rate = group["lr"]
            updated = parameter * (1 - rate * group["weight_decay"]) + rate * direction
            _replace(parameter, updated, blocked)
            _replace(state["momentum_buffer"], buffer, blocked)


def _replace(target: Tensor, value: Tensor, blocked: Tensor | None) -> None:
    target.copy_(value if blocked is None else torch.where(blocked > 0, target, value))
