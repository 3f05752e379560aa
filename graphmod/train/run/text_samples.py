"""Text that the model being trained writes, every so many steps.

Sampling reads the weights where they are and draws no number from torch's generators, so that a run's losses are the
same with and without it.
"""

from contextlib import suppress

from tqdm import tqdm
from transformers import PreTrainedModel

from graphmod.decode.text.codec import ByteCodec, TokenizerCodec
from graphmod.train.batches import Data
from graphmod.train.metrics import Metrics
from graphmod.train.settings import RunConfig, Scope

_SHARE_OF_PROMPT = 4  # of the positions a model has, so that a long prompt leaves room to write


class Samples:
    """Prints samples and logs them under `samples`.

    Args:
        model: the one that is trained.
        config: of the run; `train.sample_*`, and `graph.scope`, which says whether decoding uses graphs.
        corpus: its tokenizer; bytes where it has none.
        metrics: where the text is logged.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig, corpus: Data, metrics: Metrics) -> None:
        from graphmod.decode.engine import DecodeEngine  # which no run without samples loads

        self._train, self._metrics = config.train, metrics
        self._codec = ByteCodec() if corpus.tokenizer is None else TokenizerCodec(corpus.tokenizer)
        self._prompt = self._codec.encode(self._train.sample_prompt)
        positions = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        self._prompt = self._prompt[: max(1, positions // _SHARE_OF_PROMPT)]
        self._engine = DecodeEngine(
            model,
            max_batch_size=1,
            max_seq_len=min(positions, len(self._prompt) + self._train.sample_tokens),
            codec=self._codec,
            graphs=config.graph.scope is not Scope.none,
            generation_config="none",  # `train.sample_temperature` says how to choose
        )

    def due(self, done: int) -> bool:
        """Whether to sample after `done` steps."""
        return done % self._train.sample_every == 0 or done == self._train.steps

    def show(self, done: int) -> None:
        """Samples once, with a seed that differs from step to step."""
        (completion,) = self._engine.generate(
            [self._prompt],
            max_new_tokens=self._train.sample_tokens,
            temperature=self._train.sample_temperature,
            seed=done,
        )
        text = self._train.sample_prompt + (completion.text or "")
        if completion.error is not None:
            text = f"{text} [{completion.error}]"
        with suppress(OSError):  # nobody reads it any more; it is logged as well
            tqdm.write(f"--- step {done}\n{text}")
        self._metrics.log_text("samples", text, done)
