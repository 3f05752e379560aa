"""Where the saved model is that a name means: in a folder, or in the cache of Hugging Face. No torch; no downloads."""

import json
import re
from pathlib import Path

from graphmod.errors import ConfigError

NO_DOWNLOAD = "give that of a saved model (save_pretrained of model and tokenizer); nothing is downloaded"
MANIFEST_FILE = "checkpoint.json"  # of a checkpoint of a run
WEIGHTS_FILE = "model.safetensors"
# As names on the hub are: `owner/model`, or `model`.
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


def saved_folder(path: str, otherwise: str = "") -> Path:
    """The folder that `model.path=path` means: itself, or, where there is none, what `hf download` left of the model
    of that name in the cache.

    Args:
        otherwise: what else may be done where there is neither, for the error.

    Raises:
        ConfigError: there is neither.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    like_a_name = _NAME.fullmatch(path) is not None and not folder.exists()
    if like_a_name and (found := _in_cache(path)) is not None:
        return found
    hub = f"; `hf download {path}` brings the model of that name on the Hugging Face hub" if like_a_name else ""
    raise ConfigError(f"model.path={path} is not a folder; {NO_DOWNLOAD}{hub}{otherwise}")


def _in_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def require_no_own_model(folder: Path) -> None:
    """Raises ConfigError where `folder` is a checkpoint of a model of one's own, which transformers cannot build."""
    for checkpoint in (folder, folder.parent):  # averaged weights lie in a folder of the checkpoint
        try:
            target = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))["config"]["model"]["target"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if target is not None and not (folder / "config.json").is_file():
            name = target["_target_"]
            raise ConfigError(
                f"model.path={folder} is a checkpoint of a model of your own, {name}, and only models of transformers "
                f"can be loaded here. To train on: train.resume={checkpoint.parent.parent}. In Python: model = "
                f"{name.rpartition('.')[2]}(...); safetensors.torch.load_model(model, '{folder / WEIGHTS_FILE}')"
            )
