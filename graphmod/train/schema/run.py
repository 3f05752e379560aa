"""All settings of a run, and which cannot be meant together.

The YAML files in `configs/` fill these classes in, and `cli/app.py` turns a composed config into them. Nothing here
loads PyTorch, which takes seconds: what is wrong is said at once. What is asked of the device and of the libraries,
`train/run/device.py` looks at. Checks read nothing but file names and change nothing, save `data.path` and `train.log`,
which they make lists, `model.path`, which becomes a folder, and `data.seq_len`, which is the longest of `data.buckets`.
"""

from dataclasses import dataclass, field

from graphmod.config import CompileMode
from graphmod.train.schema.data import DataConfig, check_data
from graphmod.train.schema.limits import require
from graphmod.train.schema.model import ModelConfig, check_model
from graphmod.train.schema.optim import OptimConfig, OptimizerName, check_optim
from graphmod.train.schema.parallel import ParallelConfig, check_parallel
from graphmod.train.schema.train import TrainConfig, check_train
from graphmod.train.settings import Scope, TrainGraphConfig

DRAWS_IN_COMPILED_CODE = (
    "train.activation_checkpointing=true runs layers twice, and compiled code would draw other numbers for dropout the "
    "second time; set the model's dropout to 0, or use graph.compile=none"
)


@dataclass
class GraphConfig(TrainGraphConfig):
    """The settings of `TrainGraphConfig`, and what only a training run has.

    Attributes:
        compile: `default` fuses kernels with torch.compile before they are captured; `max` also lets it try out which
            variants are fastest, which takes minutes once.
        auto: measure the scopes on the first steps and keep the fastest; `scope` is then what it starts with.
        check: train nothing; say what would keep the step out of graphs, write `check.json`, and end with status 0 (it
            would be captured) or 1.
    """

    compile: CompileMode = CompileMode.none
    auto: bool = False
    check: bool = False


@dataclass
class RunConfig:
    """Everything one run of `train.py` is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def _check_split(config: RunConfig) -> None:
    """Raises ConfigError for what needs a whole model on each rank."""
    mode = config.parallel.mode
    if not (mode.shards or mode.splits_layers):
        return
    asked = {
        f"train.sample_every={config.train.sample_every}, which writes text with a model": config.train.sample_every,
        "optim=muon, which updates whole matrices": config.optim.name is OptimizerName.muon,
        "optim=sgd, which PyTorch fuses for whole parameters only": config.optim.name is OptimizerName.sgd,
        f"model.lora.r={config.model.lora.r}, whose adapters lie inside the matrices": mode.splits_layers
        and config.model.lora.r,
    }
    for what, wanted in asked.items():
        require(
            not wanted,
            f"parallel={mode.value} leaves each rank a part of the model, and {what}, needs all of it; leave that out, "
            "or use parallel=ddp",
        )


def check(config: RunConfig) -> None:
    """Raises ConfigError for the first setting, combination or path that cannot work."""
    train, graph = config.train, config.graph
    check_model(config.model)
    check_data(config.data, config.model)
    check_optim(config.optim)
    check_train(train)
    check_parallel(config.parallel)
    _check_split(config)
    require(
        train.eval_every == 0 or config.data.eval_fraction > 0,
        "train.eval_every asks for evaluations, but data.eval_fraction=0 keeps nothing to evaluate on; "
        "set data.eval_fraction=0.05, or train.eval_every=0",
    )
    require(
        not graph.auto or graph.scope is Scope.none,
        f"graph.auto=true chooses the scope itself; got graph.scope={graph.scope.value} too. Use graph=auto alone",
    )
    require(
        not graph.auto or config.data.buckets is None,
        "graph=auto measures steps of one shape and data.buckets has several; choose a scope, or data.packing=true",
    )
    require(
        graph.scope is Scope.none or config.data.buckets is None or len(config.data.buckets) <= graph.max_graphs,
        f"data.buckets has {len(config.data.buckets or ())} lengths and graph.max_graphs={graph.max_graphs} allows "
        "fewer graphs; raise it",
    )
    require(
        graph.layers is None or graph.scope is Scope.per_layer or graph.auto,
        f"graph.layers chooses the modules of graph=per_layer and does nothing with graph.scope={graph.scope.value}",
    )
    draws = config.model.dropout or config.model.lora.dropout
    require(
        graph.compile is CompileMode.none or not (train.activation_checkpointing and draws),
        DRAWS_IN_COMPILED_CODE,
    )
