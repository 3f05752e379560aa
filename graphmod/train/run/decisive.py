"""The settings and the text that decide the numbers of a run, and whether two runs have the same."""

from fractions import Fraction
from pathlib import Path
from typing import Any

from graphmod.errors import ConfigError
from graphmod.train.optim import learning_rates
from graphmod.train.settings import ADAPTER_FILE, MERGED_FOLDER, RunConfig, plain_config

# How long a run is may change, too; what that does to its numbers, `extension` says.
_LENGTH = {"train.steps"}
# What is not here may change on resuming: where graphs are used, what is logged, evaluated and saved.
_DECISIVE = {
    "model": None,
    "data": None,
    "optim": None,
    "graph": {"compile"},
    "train": {"steps", "grad_accumulation", "precision", "seed", "deterministic", "nonfinite", "ema_decay", "loss"},
}
# The text itself is compared instead, by fingerprint; the weights come from the checkpoint.
_BY_CONTENT = {
    *("model.path", "data.source", "data.path", "data.pattern", "data.tokenizer", "data.max_bytes", "data.column"),
    *("data.train_on", "data.split", "data.cache", "data.target"),
}
# Settings within one setting, which are compared each by itself; other dicts are compared as a whole.
_NESTED = ("model.lora",)
# They decide what is saved beside the weights.
_OF_SAVING = {"model.lora.merge"}


def _each(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by full name, those that hold others opened; without those that decide no number."""
    found = {}
    for name, value in settings.items():
        if name in _NESTED and isinstance(value, dict):
            found |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            found[name] = value
    return {name: value for name, value in found.items() if name not in _OF_SAVING}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return _each({f"{group}.{name}": value for group, values in config.items() for name, value in values.items()})


def decisive_settings(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The settings that decide the numbers of a run, by their full name.

    Args:
        config: all settings as plain values, by group.
        device: kind of device, `cpu` or `cuda`.
    """
    found = {
        f"{group}.{name}": value
        for group, names in _DECISIVE.items()
        for name, value in config[group].items()
        if (names is None or name in names) and f"{group}.{name}" not in _BY_CONTENT
    }
    if not config["data"]["packing"]:
        del found["data.packing_attention"]
    return {**_each(found), "train.device": device}


def with_changes(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Decisive settings, with the values in `given` of those that are among them, by full name."""
    # The device stands in `given` as it was asked for, which may be `auto`.
    changed = _each(given)
    return {
        name: value if name == "train.device" else changed.get(name, value) for name, value in _each(settings).items()
    }


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each decisive setting that is not what it was, in words. One that `saved` lacks came later, and was what it is by
    default."""
    defaults = _flat(plain_config(RunConfig()))
    was = {name: defaults.get(name, value) for name, value in now.items()} | _each(saved)
    # Those that have nothing to do with this run are left out of its settings.
    return [f"{name} was {was[name]} and is now {now.get(name)}" for name in sorted(was) if was[name] != now.get(name)]


def all_settings(manifest: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint, by group: those that this version knows.

    Args:
        manifest: of the checkpoint.
    """
    known = plain_config(RunConfig())
    return {
        group: {name: value for name, value in values.items() if name in known[group]}
        for group, values in manifest["config"].items()
        if group in known
    }


def extension(manifest: dict[str, Any], config: RunConfig) -> str | None:
    """What another number of steps than its checkpoint was made for means for a run; None where it is the same.

    The numbers are those of a run that had as many from the start, bit for bit, when the learning rates of the steps
    that are done are the same for both.
    """
    before, now, done = all_settings(manifest)["train"]["steps"], config.train.steps, manifest["steps_done"]
    if before == now:
        return None
    was, rates = learning_rates(config.optim, before), learning_rates(config.optim, now)
    if was[:done] == rates[:done]:
        return f"train.steps was {before}; the numbers are those of a run that had {now} steps from the start"
    then = f" (step {done}: {was[done - 1]:.3g}, step {done + 1}: {rates[done]:.3g})" if done < now else ""
    return (
        f"train.steps was {before}; the learning rate now follows the schedule for {now} steps{then}. The numbers "
        f"differ from those of a run that had {now} steps from the start"
    )


def _anew(where: Path, manifest: dict[str, Any]) -> str:
    """How to go on with the weights of a checkpoint alone."""
    run, steps = where.parent.parent, manifest["steps_done"]
    if (where / MERGED_FOLDER).is_dir():
        where = where / MERGED_FOLDER
    elif (where / ADAPTER_FILE).is_file():
        # Adapters are no model to start from; a checkpoint of the same run may hold one.
        return (
            f"have a whole model saved (train.resume={run} model.lora.merge=true train.steps={steps + 1}) and start "
            "anew from that: train.resume=none model=local "
            f"model.path={where.with_name(f'step_{steps + 1:08d}') / MERGED_FOLDER}"
        )
    elif not (where / "config.json").is_file():  # a model of one's own, which is not loaded by its folder
        return "start anew: train.resume=none"
    return f"start anew from its weights: train.resume=none model=local model.path={where}"


def other_ranks(manifest: dict[str, Any], config: RunConfig, ranks: int, arranged: str) -> str | None:
    """What it means that other ranks wrote a checkpoint; None where they were the same.

    Args:
        ranks: how many with different batches.
        arranged: how all share the model, in words.
    """
    before, so = manifest["ranks"], manifest["arrangement"]
    if before == ranks and so == arranged:
        return None
    if before == ranks:
        return f"resuming with {arranged}, after {so}: everything continues, and the numbers differ by rounding"
    was, now = before * all_settings(manifest)["train"]["grad_accumulation"], ranks * config.train.grad_accumulation
    size = (
        "a step has as many sequences as before, so the numbers differ only by rounding and dropout"
        if was == now
        else f"a step has {_times(now, was)} the sequences it had, so the numbers differ"
        f"{f' (train.grad_accumulation={was // ranks} keeps them)' if was % ranks == 0 else ''}"
    )
    return (
        f"resuming with {arranged}, after {so}: steps, learning rates, optimizer and the position in the data "
        f"continue; {size}"
    )


def _times(now: int, was: int) -> str:
    part = Fraction(now, was)
    return f"{part} of" if part < 1 else f"{part} times"


def require_same(
    where: Path,
    manifest: dict[str, Any],
    settings: dict[str, Any],
    data: str | None = None,
    ranks: int | None = None,
) -> None:
    """Raises ConfigError when the run that wrote a checkpoint had other settings, the number of steps apart, or another
    text.

    Args:
        where: the checkpoint, for the message.
        manifest: of it.
        settings: the decisive ones of now.
        data: fingerprint of the tokens of now; None does not compare them.
        ranks: how many there are now. Where they were more or fewer, or it is not known yet, the number of microbatches
            may be another, too.
    """
    anew = _anew(where, manifest)
    free = _LENGTH if ranks == manifest["ranks"] else {*_LENGTH, "train.grad_accumulation"}
    saved = {name: value for name, value in manifest["settings"].items() if name not in free}
    changed = differences(saved, {name: value for name, value in settings.items() if name not in free})
    if changed:
        raise ConfigError(
            f"{where} was trained with different settings, which decide its numbers: {'; '.join(changed)}. Use those "
            f"it had, or {anew}"
        )
    if data is not None and manifest["data"] != data:
        raise ConfigError(
            f"{where} was trained on different data ({manifest['data']}, now {data}: number of tokens and checksum); "
            f"bring back the data it had, or {anew}"
        )
