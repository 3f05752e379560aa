"""Programs in which something changes outside between calls: an eager twin against a graphed one, bit for bit.

`python -m tests.guards.staleness --all` runs every cell of the table and lists those whose numbers are not eager's, and
those that no graph serves. Other arguments choose cells by parts of their names.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import re
import sys
import textwrap
import time
import types
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmod import CUDAGraphModule, graph_layers
from graphmod.train.settings import TrainGraphConfig
from tests.guards import staleness_pieces as pieces

SCOPES = ("no_grad", "backward", "step", "layers")
PHASES = (("", 6), ("change", 6), ("back", 4), ("change", 3))
_compiled: dict[str, Any] = {}


class Cell(NamedTuple):
    value: str
    home: str
    form: str
    scope: str

    def __str__(self) -> str:
        return " / ".join(self)


class Outcome(NamedTuple):
    """What became of a cell.

    Attributes:
        wrong: in what it differs from eager; empty where it does not.
        served: for each phase, whether the last call came from a graph.
        reason: why the last call did not.
    """

    wrong: str
    served: tuple[bool, ...]
    reason: str


def source(cell: Cell) -> str | None:
    """The program of a cell; None where its parts do not go together."""
    value, home, form = pieces.VALUES[cell.value], pieces.HOMES[cell.home], pieces.FORMS[cell.form]
    if home.given and "READ" not in form and "BASE" not in form and form:
        return None
    if "BASE" in form and not home.read.rpartition(".")[2].isidentifier():
        return None
    base, _, name = home.read.rpartition(".")
    if cell.home == "thread's" and cell.form == "thread":  # which has none there
        return None
    if cell.home == "attribute of a method" and cell.scope == "layers":  # whose forward is the wrapper's
        return None
    if name != "value" and ("'ue'" in form or "value=v" in form):
        return None
    if cell.home in ("environment", "getenv") and cell.value not in ("str", "text of a number"):
        return None
    use = value.use
    if form.startswith("inline "):
        use = re.sub(r"\bv\b", lambda _: f"({form.removeprefix('inline ')})", use)

    def filled(text: str) -> str:
        text = text.replace("BASE", base).replace("NAME", repr(name)).replace("READ", home.read)
        return text.replace("FIRST", value.first).replace("USE", value.use)

    body = f"return {filled(use)}"
    if not form.startswith("inline "):
        body = f"{filled(form)}\n{body}"
    given = ", given=None" if home.given else ""
    lines = [
        filled(pieces.HELPERS),
        filled(home.before),
        "class Net(Base):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.linear = linear(7)",
        textwrap.indent(filled(home.init), "        "),
        "    " + filled(home.body),
        f"    def forward(self, x{given}):",
        "        h = self.linear(x)",
        textwrap.indent(body, "        "),
        filled(pieces.BODY),
        filled(home.after),
        "net = Net()",
    ]
    return "\n".join(lines)


def changes(cell: Cell) -> dict[str, str]:
    """Phase -> the statements that begin it."""
    value, home = pieces.VALUES[cell.value], pieces.HOMES[cell.home]
    if value.exchanged:
        new = {"change": value.change, "back": value.back}
        return {phase: home.write.replace("NEW", f"({text})") for phase, text in new.items()}
    found = home.find or home.read.replace("self", "net")
    if home.given:
        found = home.read.replace("given", home.given)
    new = {"change": value.change, "back": value.back}
    return {phase: f"v = {found}\n{text[1:]}" for phase, text in new.items()}


def _run(text: str, name: str, space: dict) -> None:
    code = _compiled.get(text)
    if code is None:
        code = compile(text, name, "exec")
        if len(text) > 2000:
            _compiled[text] = code
    exec(code, space)


def _x(step: int, device: torch.device) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(device)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, nn.Linear(4, 4)])

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        for layer, more in zip(self.layers, (given, ()), strict=True):
            x = layer(x, *more)
        return x


def play(cell: Cell, device: torch.device, graphed: bool) -> tuple[list, list[bool], str]:
    """What each call of a cell's program gives, whether a graph served the last of each phase, and why not."""
    program = types.ModuleType("own_program")
    sys.modules["own_program"] = program
    space = program.__dict__
    space["DEVICE"] = device
    _run(pieces.PRELUDE, "prelude.py", space)
    torch.manual_seed(3)
    random.seed(3)
    _run(source(cell), "program.py", space)
    space["ns"] = space
    for phase in (text for text in changes(cell).values()):
        compile(phase, "change.py", "exec")
    net = space["net"]
    net.to(device)
    given = (space["GIVEN"],) if pieces.HOMES[cell.home].given else ()
    settings = TrainGraphConfig(warmup_steps=2)
    wrappers: list[CUDAGraphModule] = []
    model = Model(net).to(device) if cell.scope == "layers" else net
    optimizer = torch.optim.SGD(net.linear.parameters(), lr=0.01, fused=cell.scope == "step")

    def iteration(x: Tensor, *given: Any) -> Tensor:
        loss = model(x, *given).pow(2).sum()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run: Any = iteration if cell.scope == "step" else model
    if graphed and cell.scope == "layers":
        wrappers = graph_layers(model, settings, layers="layers.0")
    elif graphed:
        run = CUDAGraphModule(run, settings)
        wrappers = [run]
    results: list[Any] = []
    served = []
    step = 0
    for phase, calls in PHASES:
        if phase:
            _run(changes(cell)[phase], "change.py", space)
        replays = 0
        for _ in range(calls):
            step += 1
            replays = sum(one.stats.replays for one in wrappers)
            torch.manual_seed(step)
            x = _x(step, device)
            if cell.scope == "no_grad":
                with torch.no_grad():
                    results.append(run(x, *given).clone())
                continue
            loss = run(x, *given)
            if cell.scope != "step":
                loss = loss.pow(2).sum()
                if loss.requires_grad:
                    loss.backward()
                grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
                results.append(grads)
                optimizer.step()
                net.zero_grad()
            results.append([loss.detach().clone(), *(p.detach().clone() for p in net.linear.parameters())])
        served.append(sum(one.stats.replays for one in wrappers) > replays)
    reason = wrappers[0].last_failure if wrappers else ""
    return results, served, reason


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def outcome(cell: Cell, device: torch.device) -> Outcome | None:
    """Plays a cell on both twins. None where its program is none."""
    try:
        eager, _, _ = play(cell, device, False)
    except (AttributeError, KeyError, NameError, TypeError):
        return None
    graphed, served, reason = play(cell, device, True)
    wrong = [index for index, pair in enumerate(zip(eager, graphed, strict=True)) if not _same(*pair)]
    return Outcome(f"differs from call {wrong[0]} of {len(eager)}" if wrong else "", tuple(served), reason)


def cells() -> Iterator[Cell]:
    """Every cell of the table."""
    every = itertools.chain(
        (Cell(value, home, "variable", scope) for value in pieces.VALUES for home in pieces.HOMES for scope in SCOPES),
        (
            Cell(value, home, form, SCOPES[zlib.crc32(f"{value}{home}{form}".encode()) % 4])
            for value in pieces.PLAIN
            for home in pieces.HOMES
            for form in pieces.FORMS
        ),
        (
            Cell(value, "attribute", form, SCOPES[zlib.crc32(f"{value}{form}".encode()) % 4])
            for value in pieces.VALUES
            for form in pieces.FORMS
        ),
    )
    return (cell for cell in every if source(cell) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="I/N: only each N-th cell, from the I-th on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--unserved", action="store_true", help="list also what no graph serves")
    parser.add_argument("names", nargs="*", help="parts: VALUE / HOME / FORM / SCOPE, * for any")
    options = parser.parse_args()
    chosen = list(dict.fromkeys(cells()))
    if options.names:
        wanted = [tuple(part.strip() for part in name.split("/")) for name in options.names]
        chosen = [
            cell
            for cell in chosen
            if any(all(p in ("*", c) for p, c in zip(name, cell, strict=False)) for name in wanted)
        ]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    index, count = map(int, options.part.split("/"))
    chosen = chosen[index::count]
    logging.getLogger("graphmod").setLevel(logging.ERROR)
    wrong = unserved = errors = none = 0
    began = time.perf_counter()
    for cell in chosen:
        try:
            found = outcome(cell, torch.device(options.device))
        except Exception as error:
            errors += 1
            print(f"ERROR   {cell}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        if found is None:
            none += 1
        elif found.wrong:
            wrong += 1
            print(f"SILENT  {cell}: {found.wrong}, served {found.served}", flush=True)
        elif not all(found.served):
            unserved += 1
            if options.unserved:
                print(f"eager   {cell}: served {found.served}, {found.reason[:150]}", flush=True)
    print(
        f"{len(chosen) - none} cells, {wrong} silent, {unserved} not always served, {errors} errors, "
        f"{time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
