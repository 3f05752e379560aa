"""The Python code of the pages runs, page by page from top to bottom, on a small model."""

import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphmod
from graphmod import CUDAGraphModule, ungraph
from tests.support.made_tokenizers import llama_like
from tests.support.settings import ROOT

# Sizes of the pages -> those that a CPU computes in a moment.
SMALLER = {
    "max_new_tokens=256": "max_new_tokens=4",
    "max_new_tokens=200": "max_new_tokens=4",
    "n=8": "n=2",
    "max_seq_len=32768": "max_seq_len=64",
    "temperature=0.8)": "temperature=0.8, max_new_tokens=4)",
    'adapter="sql")': 'adapter="sql", max_new_tokens=4)',
    "engine.stream([prompt])": "engine.stream([prompt], max_new_tokens=4)",
}


def blocks(page):
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.M | re.S)
    for old, new in SMALLER.items():
        found = [block.replace(old, new) for block in found]
    return found


def causal(words=64):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, max_position_embeddings=1024, **sizes))


def fused(model):
    return torch.optim.AdamW(model.parameters(), fused=True, capturable=True)


def test_the_code_of_decode_runs(capsys, tmp_path, monkeypatch):
    tokenizer = llama_like()
    model, rewards, trained = causal(len(tokenizer)), [], []
    names = {
        **{"model": model, "tokenizer": tokenizer, "batches": [0, 1], "steps": 2, "step": 0, "due": lambda: True},
        **{"prompts": [[1, 5, 6], [7, 8]], "prompt": [5, 6], "train_step": float, "train": trained.append},
        "reward": lambda *one: rewards.append(one),
    }
    while_training, suspending, exact, submitting, threaded = blocks("decode")
    with_text, streaming, processing, adapting, offloading = blocks("decode_engine")
    exec(while_training, names)
    exec(suspending, names)
    assert len(rewards) == 2 * 4 and [len(completions) for completions in trained] == [4, 4]
    ids = torch.tensor([[1, 5, 6, 7]])
    trainer = names | {"ids": ids, "mask": torch.ones_like(ids), "positions": torch.arange(4).unsqueeze(0)}
    exec(exact, trainer)
    assert trainer["logits"].shape == (1, 4, len(tokenizer)) and len(trainer["completions"]) == 2
    names["engine"].resume()
    exec(submitting, names)
    exec(with_text, names)
    exec(threaded, names)
    assert len(names["completions"]) == 2
    capsys.readouterr()
    exec(streaming, names)
    assert capsys.readouterr().out.strip()
    names["digits"] = torch.arange(len(tokenizer)) > 20
    exec(processing, names)
    assert max(token for done in names["found"] for token in done.tokens) <= 20
    exec(offloading, names)
    folder = tmp_path / "adapters" / "sql"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    pair = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(64, 2)}
    pair = {f"base_model.model.model.layers.1.mlp.up_proj.{name}.weight": one for name, one in pair.items()}
    save_file(pair, folder / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)
    exec(adapting, names)


def test_the_step_of_train_runs():
    class Classifier(nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1))

    model = Classifier(3 * 4 * 4, 5)
    names = {"model": model, "optimizer": fused(model)}
    names |= {"images": torch.randn(2, 3, 3, 4, 4), "labels": torch.randint(5, (2, 3))}
    (block,) = blocks("train")
    exec(block, names)
    losses = [names["step"]({"images": names["images"], "labels": names["labels"]}).item() for _ in range(6)]
    assert losses[-1] < losses[0] and names["step"].stats.replays > 0


def test_the_code_of_the_library_runs():
    model, other = nn.Module(), causal()
    model.layers = nn.ModuleList(nn.Sequential() for _ in range(2))
    for layer in model.layers:
        layer.mlp = nn.Linear(4, 4)
    names = {"layer": nn.Linear(4, 4), "model": model, "other": other}
    wrapping, parts = blocks("library")
    exec(wrapping, names)
    assert isinstance(names["layer"], CUDAGraphModule)
    ungraph(other)
    names["history"] = []
    exec(parts, names)
    step = CUDAGraphModule(lambda x: names["tell"](x.sum()) or x * 2)
    for _ in range(8):
        step(torch.ones(2, 4))
    assert step.stats.eager_parts == step.stats.replays > 0 and len(names["history"]) == 8


def test_the_code_of_loops_runs():
    model = causal()
    (block,) = blocks("loops")
    exec(block, {"model": model})
    for _ in range(5):
        model(input_ids=torch.ones(2, 8, dtype=torch.int64), labels=torch.ones(2, 8, dtype=torch.int64)).loss.backward()


def test_the_code_of_check_runs(monkeypatch):
    whole, of_ranks = blocks("check")
    *checks, last = whole.strip().splitlines()
    names = {"model": nn.Linear(4, 4), "x": torch.ones(2, 4)}
    exec("\n".join(checks), names)
    stand = SimpleNamespace(does="ends here", ranks=[1], location=None, follow=None)
    report = SimpleNamespace(
        hazards=[SimpleNamespace(user="train.py:18 in step")], divergences=[SimpleNamespace(stands=[stand, stand])]
    )
    assert eval(last, names | {"report": report}) == ["train.py:18 in step"]
    names |= {"step": lambda batch: None, "batch": 0, "graphmod": SimpleNamespace(check=lambda *_: report)}
    exec(of_ranks, names)


@pytest.mark.parametrize(("kind", "read"), [("Finding", "user effect remedy library backward count parts")])
def test_findings_have_what_the_page_says(kind, read):
    assert {*read.split()} <= {*graphmod.check.Finding.__dataclass_fields__}
    assert {"does", "ranks", "location", "follow"} <= {*graphmod.check.Stand.__dataclass_fields__}
    assert {"after", "stands"} <= {*graphmod.check.Divergence.__dataclass_fields__}
