"""lm-eval as a client: its requests, read as it reads the answers, and lm-eval itself where it is installed."""

import json

import pytest
import torch

from tests.support.served import Served, chat_model, tokenizer

TEXTS = ["one two three", "a b c d e f g", "zebra"]
CHOICES = [(text, choice) for text in TEXTS for choice in (" four", " h", " one two")]
UNTIL = ["\n\n", "x", "</s>"]


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), tokenizer(), max_batch_size=4) as server:
        yield server


def encode(text):
    return tokenizer()(text, add_special_tokens=False).input_ids


def scored(context, whole):
    """By the model itself: the sum of the log-probabilities after the context, and whether all are its choice."""
    with torch.no_grad():
        table = chat_model()(torch.tensor([whole])).logits[0].log_softmax(-1)
    rows, tokens = table[context - 1 : len(whole) - 1], torch.tensor(whole[context:])
    return rows.gather(1, tokens[:, None]).sum().item(), bool((rows.argmax(1) == tokens).all())


def generated(prompt, count):
    asked = {"max_new_tokens": count, "do_sample": False, "stop_strings": UNTIL[:2], "tokenizer": tokenizer()}
    made = chat_model().generate(torch.tensor([prompt]), pad_token_id=0, **asked)[0, len(prompt) :]
    text = tokenizer().decode(made, skip_special_tokens=True)
    return min((text.split(stop)[0] for stop in UNTIL), key=len)


@pytest.mark.parametrize("together", [1, 4])
def test_continuations_are_scored_as_the_model_scores_them(served, together):
    """The body of `local-completions` for a loglikelihood; of a rolling one the context is the token of the start."""
    asked = [(len(encode(text)), encode(text) + encode(more)) for text, more in CHOICES]
    asked += [(1, [1, *encode(text)]) for text in TEXTS]
    greedy = encode(TEXTS[0])
    with torch.no_grad():
        greedy += [chat_model()(torch.tensor([greedy])).logits[0, -1].argmax().item()]
    asked.append((len(greedy) - 1, greedy))
    found = []
    for begin in range(0, len(asked), together):
        prompts = [whole for _, whole in asked[begin : begin + together]]
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
        status, answer, _ = served.post("/v1/completions", body | {"echo": True})
        assert status == 200, answer
        choices = sorted(answer["choices"], key=lambda one: one["index"])
        for (context, _), choice in zip(asked[begin : begin + together], choices, strict=True):
            told, part = choice["logprobs"], slice(context, -1)
            likeliest = [max(top.values()) for top in told["top_logprobs"][part]]
            found.append((sum(told["token_logprobs"][part]), likeliest == told["token_logprobs"][part]))
    expected = [scored(*one) for one in asked]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [best for _, best in found] == [best for _, best in expected]
    assert expected[-1][1] and not expected[0][1]


def test_generations_end_where_the_model_itself_ends_them(served):
    settings = {"model": "tiny", "max_tokens": 24, "temperature": 0.0, "seed": 1234}
    asked = settings | {"prompt": [encode(text) for text in TEXTS], "stop": UNTIL}
    answer = served.post("/v1/completions", asked)[1]
    assert [one["text"] for one in answer["choices"]] == [generated(encode(text), 24) for text in TEXTS]
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        answer = served.post("/v1/chat/completions", settings | {"messages": messages, "stop": UNTIL[:2]})[1]
        prompt = tokenizer().apply_chat_template(messages, add_generation_prompt=True).input_ids
        assert answer["choices"][0]["message"]["content"] == generated(prompt, 24)


TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0},
    "texts": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": UNTIL[:2], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
    },
}


@pytest.mark.slow
def test_lm_eval_itself_finds_what_it_finds_of_the_same_folder(served, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    chat_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": text, "choices": ["four", "h", "one two"]} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    for name, settings in TASKS.items():
        whole = {"task": name, "test_split": "test", "doc_to_text": "{{text}}"} | data | settings
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps(whole))  # which YAML contains

    def responses(model, arguments, tasks, **more):
        manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        given = {"tasks": tasks, "task_manager": manager, "bootstrap_iters": 0} | more
        samples = lm_eval.simple_evaluate(model=model, model_args=arguments, **given)["samples"]
        return [one["resps"] for task in tasks for one in sorted(samples[task], key=lambda one: one["doc_id"])]

    folder = tmp_path / "model"
    own = f"pretrained={folder},dtype=float32,device=cpu,add_bos_token=False"
    expected = responses("hf", own, [*TASKS])
    for more in ("", ",num_concurrent=4,batch_size=2"):
        given = f"model=tiny,tokenizer={folder},base_url={served.url}/v1/completions,max_length=512{more}"
        assert _same(responses("local-completions", given, [*TASKS]), expected)
    chat = {"tasks": ["answers"], "apply_chat_template": True}
    given = f"model=tiny,base_url={served.url}/v1/chat/completions"
    assert responses("local-chat-completions", given, **chat) == responses("hf", own, **chat)


def _same(found, expected):
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return found == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)
