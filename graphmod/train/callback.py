"""The Hydra callback that compares the runs of a multirun when the last one is done. Imports hydra's interface."""

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from graphmod.train.comparison import compare, remarks, table, write_comparison
from graphmod.train.result import RunResult


class ComparisonCallback(Callback):
    """Remembers where each job wrote and, at the end, prints the table and writes `comparison.json` beside them."""

    def __init__(self) -> None:
        self._jobs: dict[Path, str] = {}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Notes the folder of a job that ended, well or not."""
        self._jobs[Path(config.hydra.runtime.output_dir)] = str(config.graph.scope.value)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compares what the jobs left behind; one that left nothing is listed as failed."""
        sweep = Path(config.hydra.sweep.dir)
        results = {}
        for folder, scope in self._jobs.items():
            try:
                result = RunResult.read(folder)
            except (OSError, ValueError, TypeError) as error:
                result = RunResult(scope=scope, status="failed", error=f"it left no result ({error})")
            results[folder.name] = result
        rows = compare(results)
        print(f"\n{table(rows)}")
        for remark in remarks(rows, results):
            print(remark)
        print(f"\nwritten to {write_comparison(sweep, rows)}\nside by side: tensorboard --logdir {sweep}")
