"""Which setting, or which choice of a group, a name was probably meant to be: misspelt ones, and those of other
programs. No PyTorch."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from graphmod.train.schema.run import RunConfig
from graphmod.words import nearest

# What other programs call a setting -> its last name here, its full name, or, with a value, what to write.
_ELSEWHERE = {
    **dict.fromkeys(("block_size", "context_length", "max_length", "max_seq_length", "sequence_length"), "seq_len"),
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clip_val", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "amp"), "precision"),
    **dict.fromkeys(("max_iters", "max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_head", "num_attention_heads"), "heads"),
    **dict.fromkeys(("n_layer", "num_hidden_layers"), "layers"),
    **dict.fromkeys(("eval_interval", "eval_steps"), "eval_every"),
    **dict.fromkeys(("log_interval", "logging_steps"), "log_every"),
    **dict.fromkeys(("save_every", "save_interval", "save_steps"), "checkpoint_every"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), "schedule"),
    **dict.fromkeys(("dataset", "data_dir", "data_path", "file", "files", "folder", "train_file"), "data.path"),
    **dict.fromkeys(("ckpt", "checkpoint_path", "model_name_or_path", "model_path"), "model.path"),
    **dict.fromkeys(("devices", "nproc_per_node", "num_gpus", "world_size"), "parallel.gpus"),
    **dict.fromkeys(("log_dir", "logdir", "out_dir", "output_dir", "run_dir", "save_dir"), "hydra.run.dir"),
    **dict.fromkeys(("logger", "report_to"), "train.log"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "optim.warmup_fraction=SHARE_OF_THE_STEPS"),
    **dict.fromkeys(("num_return_sequences", "num_samples"), "n"),
    "bf16": "train.precision=bf16_mixed",
    "do_sample": "decode=sample",
    "fp16": "train.precision=fp16_mixed",
    "gradient_accumulation_steps": "grad_accumulation",
    "gradient_checkpointing": "activation_checkpointing",
    "max_tokens": "max_new_tokens",
    "optimizer": "optim",
    "wandb": "train.log=wandb",
}
# Of a group, what other programs call its choice: `model.name=gpt2` is `model=gpt2`.
_CHOICE = ("kind", "name", "type")
# What a choice is called as well -> its name here.
_SCOPES = {
    **dict.fromkeys(("eager", "false", "no", "null", "off"), "none"),
    **dict.fromkeys(("on", "step", "true", "whole", "whole_step", "yes"), "full_iteration"),
}
_HF_FILES = (".arrow", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv")


def setting_names(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Every key a run understands, such as `train.steps`, and the groups themselves, such as `train`."""
    names = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        names.append(name)
        if dataclasses.is_dataclass(field.type):
            names += setting_names(field.type, f"{name}.")
    return names


def last_names(group: str, names: list[str]) -> list[str]:
    """Those of the settings of a group, or, with an empty name, of what is in no group, and the groups."""
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == group]


def _shortened(short: str, words: dict[str, str]) -> str | None:
    """What the only word that `short` begins, or has the initials of, stands for; None where there are more or none."""
    found = [
        name
        for word, name in words.items()
        if word.startswith(short) or "".join(part[0] for part in word.split("_") if part) == short
    ]
    return found[0] if len(found) == 1 and len(short) > 1 else None


def _from_elsewhere(last: str, siblings: dict[str, str], anywhere: dict[str, str], names: list[str]) -> str | None:
    """What `last` of another program is here; None where it is nothing, or of a command without that setting."""
    here = _ELSEWHERE.get(last)
    if here is None or here.startswith("hydra."):
        return here if "train" in names else None
    key = here.partition("=")[0]
    found = here if key in names else siblings.get(here) or anywhere.get(here)
    # Of `model.file` only that of the same group can be meant, if it has one.
    same = siblings.get(key.rpartition(".")[2]) if "." in key and "=" not in here else None
    return same or found


def meant(key: str, names: list[str]) -> str | None:
    """The setting that was probably meant, with `=` and a value where that is known, or None: a bad guess that is
    followed trains something else."""
    if key in names:
        return key
    group, _, last = key.rpartition(".")
    if group in names and last in _CHOICE and group != "model.lora":
        return group
    # Last names, of which the first setting that has one gets it; a setting of a group is not meant to be a group.
    anywhere = {name.rpartition(".")[2]: name for name in reversed(names) if "." in name or not group}
    siblings = {word: f"{group}.{word}".lstrip(".") for word in last_names(group, names)}
    known = _from_elsewhere(last, siblings, anywhere, names) or anywhere.get(last)
    if group and siblings:
        close = siblings.get(nearest(last, siblings, cutoff=0.65))
        return known or _shortened(last, siblings) or close or _shortened(last, anywhere)
    return known or _shortened(last, siblings) or _shortened(last, anywhere) or nearest(key, names, cutoff=0.65)


def most_like(word: str, options: Iterable[str]) -> list[str]:
    """Those of `options` that begin with `word`, else the one most like it; none where nothing is."""
    options = [*options]
    if (scope := _SCOPES.get(word.lower())) in options:
        return [scope]
    begun = [option for option in options if word and option.startswith(word)]
    return begun or [best for best in [nearest(word, options, cutoff=0.6)] if best]


def choice_to_write(group: str, choice: str, options: Iterable[str]) -> str:
    """What to write in place of `group=choice`, which is not among `options`; "" where nothing is like it."""
    path = Path(choice)
    is_path = path.exists() or "/" in choice or bool(path.suffix)
    if group == "data" and {"text", "hf"} <= {*options} and is_path:
        return f"data={'hf' if path.suffix in _HF_FILES else 'text'} data.path={choice}"
    if group == "model" and "local" in options and is_path:
        return f"model=local model.path={choice if path.is_dir() else 'FOLDER'} (nothing is downloaded)"
    return " or ".join(f"{group}={one}" for one in most_like(choice, options))
