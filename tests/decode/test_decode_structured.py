"""Structured output: completions are what was asked for, with the most likely tokens, or draws, of those that may come;
and nobody else in the batch notices."""

import json
import random
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod.decode import DecodeEngine, RequestError, Sampling
from graphmod.decode import structured as rooms
from graphmod.decode.sampling import MASKED, gumbel, row_keys
from graphmod.decode.structured import Grammars, fill_masks, mask_words
from graphmod.text import ByteCodec, TokenizerCodec
from tests.support.made_tokenizers import KINDS
from tests.support.sweeps import sweep

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": PERSON, "disable_any_whitespace": True},
    "schema as a text": {"json": json.dumps(PERSON), "whitespace_pattern": " ?"},
    "choice": {"choice": ["yes", "no", 'a "third"\n']},
    "regex": {"regex": "[0-9]{3}-[a-f]{1,5}"},
    "lark": {"grammar": 'start: "(" start ")" | /[01]{2}/'},
    "gbnf": {"grammar": 'root ::= "(" root ")" | [01] [01]'},
}


def tiny(vocabulary, device, end=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    ids = {"eos_token_id": end, "bos_token_id": None, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **ids)).to(device).eval()


def engine_for(kind, device, **settings):
    """With a model whose vocabulary is larger than that of the tokenizer."""
    codec = ByteCodec() if kind == "bytes" else TokenizerCodec(KINDS[kind]())
    end = 257 if kind == "bytes" else codec.around.end
    size = 260 if kind == "bytes" else len(codec.tokenizer) + 5
    return DecodeEngine(tiny(size, device, end), codec=codec, **{"max_batch_size": 8} | settings)


def expected(engine, prompt, sampling):
    """Tokens one by one, from a forward of the whole and a mask of what may come."""
    reader = engine.requests
    matcher = Grammars(reader.codec, reader.vocabulary, reader.eos).matcher(sampling.structured_outputs)
    tokens, mask = reader.tokens(prompt, 0), torch.zeros(1, mask_words(reader.vocabulary), dtype=torch.int32)
    start = len(tokens)
    for position in range(start, start + sampling.max_new_tokens):
        fill_masks([matcher], mask)
        bits = torch.tensor([int(mask[0, token // 32]) >> token % 32 & 1 for token in range(reader.vocabulary)])
        with torch.no_grad():
            logits = engine.model(torch.tensor([tokens], device=engine.device)).logits[0, -1].float().cpu()
        scores = logits.masked_fill(bits == 0, -torch.inf)
        if sampling.temperature:
            seed = torch.tensor([sampling.seed])
            scores = (
                scores / sampling.temperature + gumbel(row_keys(seed, torch.full_like(seed, position)), len(bits))[0]
            )
        tokens.append(int(scores.argmax()))
        matcher.consume_token(tokens[-1])
        if tokens[-1] in reader.eos or matcher.is_stopped():
            break
    return tokens[start:]


def random_schema(draw, depth=0):
    """A small schema whose texts are bounded, so that a random model gets to their end."""
    kinds = ["integer", "string", "enum", "boolean", "const", "number", "pattern", "null"]
    kind = draw.choice(kinds + ["object", "array", "anyOf", "object"] * (depth < 2))
    if kind == "object":
        names = draw.sample(["a", "b", "né", 'q"', "long name"], draw.randint(1, 3))
        made = {name: random_schema(draw, depth + 1) for name in names}
        needed = draw.sample(names, draw.randint(0, len(names)))
        return {"type": "object", "properties": made, "required": needed, "additionalProperties": False}
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
    if kind in ("integer", "number"):
        least = draw.randint(-200, 200)
        return {"type": kind, "minimum": least, "maximum": least + draw.randint(0, 500)}
    return {
        "string": {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 6)},
        "enum": {"enum": [1, "two", None, [3], {"four": 4.5}][: draw.randint(1, 5)]},
        "boolean": {"type": "boolean"},
        "const": {"const": draw.choice(["x\n", 7, True, ["y"]])},
        "pattern": {"type": "string", "pattern": draw.choice(["^[a-c]{2}$", "^(on|off)$", "^\\d{1,3}\\.\\d$"])},
        "null": {"type": "null"},
    }[kind]


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "llama_like"])
@pytest.mark.parametrize("count", [10, pytest.param(334, marks=pytest.mark.slow)])
def test_answers_of_random_schemas_validate(kind, count, device):
    engine = engine_for(kind, device, max_batch_size=12)
    draw = random.Random(count)
    schemas = [random_schema(draw) for _ in range(count)]
    compact = [{"json": schema, "disable_any_whitespace": True} for schema in schemas]
    asked = [
        Sampling(temperature=1.0, seed=seed, max_new_tokens=400, structured_outputs=one)
        for seed, one in enumerate(compact)
    ]
    found = engine.generate(["Give me JSON: "] * count, sampling=asked)
    for done, schema in zip(found, schemas, strict=True):
        if done.finish_reason == "length":  # a number may have any number of digits behind its point
            assert "number" in json.dumps(schema)
            continue
        assert done.finish_reason == "stop", (done.error, schema)
        jsonschema.validate(json.loads(done.text), schema)
    assert sum(done.finish_reason == "stop" for done in found) > 0.9 * count


@sweep(kind=["bytes", "byte_level", "llama_like", "slow_bytes"], temperature=[0.0, 1.2])
def test_tokens_are_the_best_or_drawn_of_those_that_may_come(kind, temperature, device):
    engine = engine_for(kind, device, max_batch_size=4)
    asked = [
        Sampling(temperature=temperature, seed=3 + number, max_new_tokens=40, structured_outputs=one)
        for number, one in enumerate(FORMS.values())
    ]
    prompts = [f"Number {number}: " for number in range(len(asked))]
    found = engine.generate(prompts, sampling=asked)
    assert [one.tokens for one in found] == [expected(engine, *both) for both in zip(prompts, asked, strict=True)]


def test_others_in_the_batch_get_what_they_get_alone(device):
    engine = engine_for("bytes", device, max_batch_size=4)
    common = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True}
    plain = [
        Sampling(seed=1, **common),
        Sampling(seed=2, **common, top_logprobs=3),
        Sampling(seed=3, **common, repetition_penalty=1.4, logit_bias={65: 2.0}),
        Sampling(seed=4, **common, stop=["\n"]),
    ]
    strict = [Sampling(seed=9, temperature=1.0, structured_outputs=one) for one in FORMS.values()]
    alone = engine.generate(["a", "bc", "def", "g"], sampling=plain)
    formed = engine.generate(["h"] * len(strict), sampling=strict)
    order = [plain[0], strict[0], strict[1], plain[1], strict[2], plain[2], strict[3], plain[3], *strict[4:]]
    texts = ["a", "h", "h", "bc", "h", "def", "h", "g", "h", "h"]
    mixed = engine.generate(texts, sampling=order)
    assert [one.tokens for one, text in zip(mixed, texts, strict=True) if text == "h"] == [x.tokens for x in formed]
    others = [one for one, text in zip(mixed, texts, strict=True) if text != "h"]
    assert [one.tokens for one in others] == [one.tokens for one in alone]
    assert others[1].top_logprobs is not None and len(others[1].top_logprobs) == len(others[1].tokens)


def test_a_batch_without_structure_has_steps_without_masks(device):
    engine = engine_for("bytes", device, max_batch_size=1)
    engine.generate(["a"], max_new_tokens=20)
    assert not any(kind & MASKED for *_, kind in engine.graphs.wrappers)
    engine.generate(["a"], max_new_tokens=20, structured_outputs={"regex": "[ab]{30}"})
    known, steps = len(engine.graphs.wrappers), engine.stats.total("launches") + engine.stats.total("eager_steps")
    engine.generate(["a"], max_new_tokens=20, ignore_eos=True)
    assert len(engine.graphs.wrappers) == known
    assert engine.stats.total("launches") + engine.stats.total("eager_steps") >= steps + 19


def test_a_step_in_two_halves_counts_once(device):
    engine = engine_for("bytes", device, max_batch_size=1)
    engine.generate(["a"], max_new_tokens=20, structured_outputs={"regex": "[ab]{30}"})
    assert engine.stats.total("launches") + engine.stats.total("eager_steps") == 19
    assert engine.stats.total("captures") == 2


@pytest.mark.parametrize("settings", [{"graphs": False}, {"prefill_tokens": 4}, {"offload": "layers"}], ids=str)
def test_the_engine_s_settings_change_no_token(settings, device):
    asked = {"temperature": 1.0, "seed": 5, "n": 3, "structured_outputs": FORMS["json"]}
    usual = engine_for("bytes", device).generate(["one prompt", "another"], **asked)
    other = engine_for("bytes", device, **settings).generate(["one prompt", "another"], **asked)
    assert [one.tokens for one in usual] == [one.tokens for one in other]
    assert len({one.text for one in usual}) > 3


def test_samples_are_followed_through_joins_aborts_and_pauses(device):
    engine = engine_for("bytes", device, max_batch_size=3)
    asked = {"temperature": 1.0, "max_new_tokens": 200, "structured_outputs": FORMS["json"]}
    wanted = {seed: engine.generate([f"p{seed}"], seed=seed, **asked)[0].tokens for seed in range(6)}
    handles = {seed: engine.submit(f"p{seed}", seed=seed, **asked) for seed in range(6)}
    plain = engine.submit("free", max_new_tokens=60, ignore_eos=True)
    for turn in range(500):
        if not engine.unfinished:
            break
        engine.step()
        if turn == 3:
            engine.abort(handles.pop(0))
        if turn == 5:
            with engine.pause():
                pass
    assert {seed: one.completions[0].tokens for seed, one in handles.items()} == {s: wanted[s] for s in handles}
    assert len(plain.completions[0].tokens) == 60


def test_it_goes_with_what_else_restricts_tokens_and_ends(device):
    engine = engine_for("bytes", device)
    ask = {"temperature": 1.0, "seed": 1, "max_new_tokens": 50}
    (done,) = engine.generate(["a"], structured_outputs={"regex": "[a-z]{40}"}, allowed_token_ids=[*b"xyz"], **ask)
    assert len(done.text) == 40 and {*done.text} == {*"xyz"}
    (done,) = engine.generate(["a"], structured_outputs={"regex": "[ab]*c[ab]{30}"}, stop=["c"], **ask)
    assert done.finish_reason == "stop" and done.text.index("c") == len(done.text) - 1
    (done,) = engine.generate(["a"], structured_outputs={"regex": "[ab]{90}"}, **ask)
    assert done.finish_reason == "length" and len(done.text) == 50
    failed, other = engine.generate(
        ["a", "b"],
        sampling=[
            Sampling(structured_outputs={"regex": "[a-z]{9}"}, bad_words=[*range(97, 123)]),
            Sampling(structured_outputs={"choice": ["yes"]}),
        ],
    )
    assert failed.finish_reason == "error" and "structured_outputs" in failed.error and other.text == "yes"


class Lost:
    """A matcher that gives up after three tokens, as one does whose grammar needs too much."""

    def __init__(self, matcher):
        self.matcher, self.left = matcher, 3

    def __getattr__(self, name):
        return getattr(self.matcher, name)

    def consume_token(self, token):
        self.left -= 1
        return self.left >= 0 and self.matcher.consume_token(token)

    def get_error(self):
        return "too many states"


def test_a_grammar_that_needs_too_much_ends_its_request_alone(device, monkeypatch):
    engine, made = engine_for("bytes", device), Grammars.matcher
    monkeypatch.setattr(
        Grammars, "matcher", lambda self, asked: (Lost if "regex" in asked else lambda x: x)(made(self, asked))
    )
    asked = [Sampling(structured_outputs=one) for one in ({"regex": "[ab]{9}"}, {"choice": ["a long one"]})]
    failed, other = engine.generate(["a", "b"], sampling=asked)
    assert failed.finish_reason == "error" and "make it simpler: too many states" in failed.error
    assert len(failed.tokens) == 3 and other.text == "a long one"


def test_graphs_may_be_captured_ahead(device):
    engine = engine_for("bytes", device, max_batch_size=2)
    engine.warm_up(kinds=(MASKED,), prefill=False, progress=False)
    captures = engine.stats.total("captures")
    assert captures == len(engine.graphs.sizes) * (len(engine.graphs.contexts) + 1)
    engine.generate(["a", "b", "c"], structured_outputs={"regex": "[ab]{9}"})
    assert engine.stats.total("captures") == captures


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": {"type": "objct"}}, "this json cannot be used: Invalid type: objct"),
        ({"json": "{"}, "this json cannot be used: EOF"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": 5}, "json must be a JSON schema: an object, or its text, got 5"),
        ({"regex": "[0-"}, "unclosed character class"),
        ({"regex": ""}, "regex must be a regular expression that is not empty, got ''"),
        ({"grammar": ""}, "grammar must be a grammar that is not empty, got ''"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": 'root ::= ("b"'}, "this grammar cannot be used: Failed to convert"),
        ({"choice": []}, r"choice must be a list of texts, got \[\]"),
        ({"choice": ["a", 5]}, r"choice must be a list of texts, got \['a', 5\]"),
        ({"regex": "a", "choice": ["b"]}, "must be an object with one of json, json_object, regex, choice, grammar"),
        ({"json_object": False}, "must be an object with one of"),
        ({"regx": "a", "regex": "a"}, "has 'regx', which is not known; it may have json, "),
        ("a", "must be an object with one of .*, got 'a'"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_with_the_fault(given, said):
    engine = engine_for("bytes", torch.device("cpu"), max_batch_size=1)
    with pytest.raises(RequestError, match=f"structured_outputs.*{said}"):
        engine.generate(["a"], structured_outputs=given)


def test_what_is_missing_is_said(monkeypatch):
    cpu, asked = torch.device("cpu"), {"structured_outputs": {"regex": "a"}}
    with pytest.raises(RequestError, match="the engine has no codec"):
        DecodeEngine(tiny(260, cpu), max_batch_size=1).generate([[5]], **asked)
    with pytest.raises(RequestError, match="a tokenizer whose tokens stand for bytes"):
        engine_for("word_piece", cpu).generate(["a"], **asked)
    with pytest.raises(RequestError, match="its tokens depend on their neighbours"):
        engine_for("slow", cpu).generate(["a"], **asked)


def raising(error):
    def call(name):
        raise error

    return call


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("version", raising(PackageNotFoundError("llguidance")), "it is not installed"),
        ("version", lambda name: "1.6.0", r"1\.6\.0 is installed"),
        ("import_module", raising(ImportError("lib.so: cannot open")), "its import fails: lib.so: cannot open"),
        ("import_module", raising(SystemError("of another Python")), "its import fails: of another Python"),
    ],
)
def test_a_library_that_cannot_be_used_is_named_with_the_version_that_is_wanted(name, answer, said, monkeypatch):
    engine = engine_for("bytes", torch.device("cpu"))
    monkeypatch.setattr(rooms, name, answer)
    engine.requests.grammars.prepare()  # at the start of a server, which goes on
    with pytest.raises(RequestError, match=rf"llguidance 1\.9 or newer, and {said}: pip install -e '.\[structured\]'"):
        engine.generate(["a"], structured_outputs={"regex": "a"})
