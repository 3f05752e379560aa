"""What processes do that tests kill."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from tqdm import tqdm

from graphmod.train import folders as ownership
from graphmod.train.folders import FolderInUse, owned
from graphmod.train.run import train
from graphmod.train.settings import RunConfig

WON, LOST = 0, 3


def _say_in(said: Path) -> None:
    """What the process says is appended to the file, for the message of a test that fails."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a copied process cannot use CUDA, and optimizers ask it where it is there
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # else it makes semaphores, which stay when the process is killed


def own_and_wait(folder: Path, reached) -> None:
    """Owns the folder until it is killed, beside a child, whose id is sent to `reached`."""
    with owned(folder):
        child = os.fork()  # as of a library that reads data in several processes
        if child:
            reached.send(child)
        time.sleep(60)


def start_at_once(folder: Path, barrier) -> None:
    """Exits with WON if it got the folder, else with LOST."""
    ownership._PATIENCE_S = 0.05
    barrier.wait()
    try:
        with owned(folder):
            barrier.wait()
        sys.exit(WON)
    except FolderInUse:
        barrier.wait()
        sys.exit(LOST)


def train_until_renamed(config: RunConfig, target: Path, said: Path) -> None:
    """Exits with LOST when the checkpoint `target` is whole and about to get its name, which an earlier one had."""
    _say_in(said)
    original = os.replace

    def replace(source, name):
        if str(source).endswith(".partial") and Path(name) == target:
            os._exit(LOST)
        original(source, name)

    os.replace = replace
    train(config, target.parent.parent)


def train_or_lose(config: RunConfig, folder: Path, said: Path) -> None:
    """Exits with WON when the run is finished, with LOST when another process is at it."""
    _say_in(said)
    ownership._PATIENCE_S = 0.05
    try:
        train(config, folder)
    except FolderInUse:
        sys.exit(LOST)
    sys.exit(WON)
