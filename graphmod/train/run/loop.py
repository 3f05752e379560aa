"""One training run from its settings to its numbers. Everything under `train/` meets here and nowhere else."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.batches import Place, load_data, make_batches
from graphmod.train.device import isolated, pick_device
from graphmod.train.display import events_fail_once, log
from graphmod.train.folders import CHECKPOINTS, checkpoints, require_whole
from graphmod.train.model import model_config
from graphmod.train.profile import profile_briefly, profile_steps
from graphmod.train.result import RunResult
from graphmod.train.run.assembly import arrangement
from graphmod.train.run.decisive import (
    decisive_settings,
    extension,
    other_ranks,
    require_same,
)
from graphmod.train.run.fitting import own_parts
from graphmod.train.run.interrupt import Aborted
from graphmod.train.run.ranks import ALONE, Ranks
from graphmod.train.run.resume import ResumePoint, claimed, finished_result
from graphmod.train.run.steps import Run
from graphmod.train.settings import LOCAL, RunConfig, plain_config
from graphmod.train.step import shapes
from graphmod.train.targets import in_words, is_own, named, passes_on

_KEPT = ("busy_ms", "comm_ms", "comm_hidden_ms")


def add_profile(run: Run, result: RunResult) -> None:
    """Adds to the result of a run what `train.profile` asks for, and, on several GPUs, how long each communicates."""
    several = run.ranks.count > 1 and run.device.type == "cuda"
    if run.config.train.profile:
        with TemporaryDirectory() as nowhere:
            folder = run.folder if run.ranks.first else Path(nowhere)
            result.profile = profile_steps(run.model, run.step, run.make_step, _batches(run), folder)
    if not several:
        return
    found = result.profile["run"] if run.config.train.profile else profile_briefly(run.step, _batches(run))
    of_ranks = run.ranks.all({name: found[name] for name in _KEPT if name in found})
    result.rank_profile = {name: [one[name] for one in of_ranks if name in one] for name in _KEPT}
    run.metrics.log_numbers({f"perf/{name}": value for name, value in result.communication().items()})


def _batches(run: Run) -> list[Any]:
    make, after = run.batches.sampler, run.config.train.steps
    batches = [make(after)]
    # Of one shape, where there are several.
    return batches + [batch for k in range(1, 64) if shapes(batch := make(after + k)) == shapes(batches[0])][:2]


def _run(run: Run, say: Callable[[str], None]) -> RunResult:
    try:
        run.open(say)
        result = run.result(run.steps())
        if not run.stopped_by:
            add_profile(run, result)
        if run.ranks.first:
            run.journal.write(result.report())
        return result
    except GraphmodError as error:
        run.journal.write(f"error: {error}")
        raise
    except Exception as error:
        if (own := own_parts(run.config)) and is_own(error) and not passes_on(error):
            raise GraphmodError(f"{own}: step {run.done + 1}: {in_words(error)}") from error
        raise
    except KeyboardInterrupt:
        raise Aborted(next(iter(checkpoints(run.folder / CHECKPOINTS)), None)) from None
    finally:
        run.close()


def _train(config: RunConfig, point: ResumePoint, ranks: Ranks, say: Callable[[str], None]) -> RunResult:
    device = pick_device(config.train.device)
    ranks = ranks.arranged(config.parallel, device)
    settings = decisive_settings(plain_config(config), device.type)
    if point.checkpoint is not None:
        # What takes no time to compare.
        require_same(point.checkpoint, point.manifest, settings, ranks=ranks.data_ranks)
    elif config.model.architecture == LOCAL:
        require_whole(Path(str(config.model.path)))
    if not ranks.first:  # which finds the tokens where the first one has put them
        ranks.wait()
    corpus = load_data(config)
    if ranks.first:
        ranks.wait()
    if config.data.target is not None and len({*ranks.all(corpus.fingerprint)}) > 1:
        raise ConfigError(
            f"{named('data', config.data.target)} has other items on each rank; ranks share them by number, so "
            "draw what is drawn from a generator with a fixed seed"
        )
    dims = model_config(config.model, corpus.vocab_size, corpus.length)
    if corpus.vocab_size is None and dims is not None:
        corpus.vocab_size = dims.vocab_size
    batches = make_batches(config, corpus, device, dims, _place(point, ranks))
    if config.train.epochs is not None:
        config = replace(config, train=replace(config.train, steps=batches.sampler.steps(config.train.epochs)))
    if point.checkpoint is not None:
        require_same(point.checkpoint, point.manifest, settings, corpus.fingerprint, ranks.data_ranks)
        if (finished := finished_result(point, config.train.steps, config.train.epochs, say)) is not None:
            return finished
        changes = (
            extension(point.manifest, config),
            other_ranks(point.manifest, config, ranks.data_ranks, arrangement(config, ranks)),
        )
        for said in changes:
            if said is not None:
                say(said)
    with isolated(device, config.train.seed, config.train.deterministic), events_fail_once():
        result = _run(Run(config, point, device, corpus, dims, batches, ranks), say)
    if ranks.first:
        result.write(point.run_dir)
    return result


def _place(point: ResumePoint, ranks: Ranks) -> Place:
    """Where in the data a run is; one that is resumed goes on there, also with another number of ranks."""
    if point.checkpoint is None:
        return Place(ranks.data_rank, ranks.data_ranks)
    return Place(ranks.data_rank, ranks.data_ranks, point.manifest["steps_done"], *point.manifest["seen"])


def train(
    config: RunConfig,
    run_dir: Path,
    point: ResumePoint | None = None,
    say: Callable[[str], None] = log.info,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Trains as told and writes its logs, `result.json` and checkpoints into the folder of the run, which no
    other process may write to meanwhile.

    Whatever happens, nothing of the run stays behind in the process: graphs, GPU memory and its peaks, random state
    and deterministic flags are as they were. SIGINT or SIGTERM ends the run after the step it is in; it is saved, and
    the result's status is `interrupted`.

    Args:
        config: checked settings, from `parse`.
        run_dir: folder of this run; made if need be. A resumed run writes to its own folder instead.
        point: where to start, from a `claimed` that is entered; None looks at `config.train.resume`.
        say: told where a run resumes from, once it is certain that it may, and what it trains on what.
        ranks: those that train together, each of which calls this with the same settings and point.

    Raises:
        ConfigError: the data or the saved model cannot be used, or a run with other settings cannot be resumed; raised
            before a model is built.
        FolderInUse: another process writes to the folder.
        GraphmodError: the folder cannot be written to, or has no room for a checkpoint.
        NonFiniteError: a loss or gradient was not finite, with `train.nonfinite=stop`.
        Aborted: a second SIGINT came before the run had ended.
    """
    with claimed(config, run_dir) if point is None else nullcontext(point) as start:
        return _train(config, start, ranks, say)
