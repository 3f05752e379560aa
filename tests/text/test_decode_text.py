"""Text and tokens: what surrounds a text, what streaming gives, what ends a completion."""

import random
import re

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graphmod.decode import DecodeEngine, RequestError
from graphmod.text import ByteCodec, StopTexts, TextStream, TokenizerCodec, TokenTexts, completion_text
from tests.support.decode_models import tiny_model
from tests.support.made_tokenizers import KINDS, byte_level, llama_like, metaspace, template, word_piece


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def drawn(tokenizer, seed):
    """A prompt and tokens, many of them bytes, spaces and special tokens."""
    some = random.Random(seed)
    count = len(tokenizer)
    pool = [some.randrange(count) for _ in range(6)] + [one % count for one in (0, 1, 2, 3 + 0xC3, 3 + 0xA4, 3 + 0x0A)]
    return some.choices(pool, k=some.randrange(4)), some.choices(pool, k=some.randrange(1, 14))


def streamed(codec, prompt, tokens, **settings):
    stream = TextStream(codec, prompt, **settings)
    return "".join([*map(stream.add, tokens), stream.rest()])


def alone(text):
    """A text with one sign for each row of bytes that are no character, of which decoders make one or several."""
    return re.sub("\ufffd+", "\ufffd", text)


def test_texts_and_bytes_of_tokens_joined_are_the_text(tokenizer):
    codec = TokenizerCodec(tokenizer)
    for seed in range(200):
        prompt, tokens = drawn(tokenizer, seed)
        texts = TokenTexts(codec, prompt)
        pieces = [*map(texts.add, tokens), texts.rest()]
        found, whole = [one for _, some in pieces for one in some], completion_text(codec, prompt, tokens)
        assert [one.token for one in found] == tokens
        assert "".join(piece for piece, _ in pieces) == whole == "".join(one.text for one in found)
        assert alone(b"".join(one.bytes for one in found).decode(errors="replace")) == alone(whole)
        assert all(whole[one.offset :].startswith(one.text) for one in found)


@pytest.mark.parametrize("kind", ["llama_like", "byte_level", "slow_bytes"])
def test_a_token_that_is_a_part_of_a_character_has_its_own_bytes(kind):
    codec = TokenizerCodec(KINDS[kind]())
    tokens = codec.encode_as_is("né 你")
    texts = TokenTexts(codec, codec.encode_as_is("a"))
    found = [one for token in tokens for one in texts.add(token)[1]] + texts.rest()[1]
    parts = [one for one in found if not one.bytes.isascii()]
    assert [one.bytes for one in parts] == [bytes([byte]) for byte in "é你".encode()]
    assert [one.text for one in parts] == ["", "é", "", "", "你"]
    if kind != "slow_bytes":  # whose decoder leaves out what is no character
        cut = TokenTexts(codec, codec.encode_as_is("a"))
        found = [one for token in tokens[:-1] for one in cut.add(token)[1]] + cut.rest()[1]
        assert [one.bytes for one in found[-2:]] == [bytes([byte]) for byte in "你".encode()[:2]]


def test_streamed_text_is_what_transformers_decodes_of_the_whole(tokenizer):
    codec, compared = TokenizerCodec(tokenizer), 0
    for seed in range(300):
        prompt, tokens = drawn(tokenizer, seed)
        for special in (False, True):
            before = tokenizer.decode(prompt, skip_special_tokens=not special) if prompt else ""
            whole = tokenizer.decode(prompt + tokens, skip_special_tokens=not special)
            if whole.startswith(before):  # else the tokens complete a character or a word of the prompt
                assert before + streamed(codec, prompt, tokens, special_tokens=special) == whole
                compared += 1
        assert streamed(codec, prompt, tokens) == completion_text(codec, prompt, tokens)
    assert compared > 100


def test_bytes_are_streamed_as_they_are_decoded():
    for seed in range(2000):
        some = random.Random(seed)
        pool = [*"aé€😀\n".encode(), 255, 300]
        prompt, tokens = some.choices(pool, k=some.randrange(4)), some.choices(pool, k=some.randrange(1, 12))
        assert streamed(ByteCodec(), prompt, tokens) == completion_text(ByteCodec(), prompt, tokens)
        assert streamed(ByteCodec(), [], tokens) == ByteCodec().decode(tokens)


def test_a_stream_of_a_fast_tokenizer_does_not_decode_everything_again():
    codec, counted = TokenizerCodec(metaspace()), []
    decode = codec.decode
    codec.decode = lambda tokens, **settings: counted.append(len(tokens)) or decode(tokens, **settings)
    stream = TextStream(codec, codec.encode("def f():"))
    pieces = [stream.add(10) for _ in range(50)]
    assert pieces == [" x"] * 50 and len(counted) <= 3
    assert stream.add(2) == "" and stream.pending == "" and max(counted[3:], default=0) <= 2


def test_text_comes_as_soon_as_nothing_can_change_it():
    codec = TokenizerCodec(llama_like())
    line, umlaut, letter = 3 + 0x0A, [3 + 0xC3, 3 + 0xA4], codec.encode("a")[-1]
    stream = TextStream(codec, codec.encode("b"))
    assert stream.add(letter) == " a"
    assert [stream.add(byte) for byte in (line, *umlaut)] == ["", "", ""]
    assert stream.pending == "\nä"  # a byte that is no character would make question marks of all three
    assert stream.add(letter) == "\nä a" and stream.rest() == ""


@pytest.mark.parametrize(
    ("made", "prompt", "document"),
    [
        (metaspace, [1, 10], [1, 10, 2]),  # both by its template, which would end prompts too
        (byte_level, [], [0]),  # EOS, which its template does not have
        (lambda: word_piece(clean=False), [1, 0], [1, 0, 2]),  # no EOS: what its template ends with
    ],
    ids=["bos_and_eos", "eos_alone", "cls_and_sep"],
)
def test_a_prompt_is_the_beginning_of_a_document(made, prompt, document):
    codec = TokenizerCodec(made())
    inner = codec.tokenizer("x", add_special_tokens=False)["input_ids"]
    assert codec.encode("x") == [*prompt[:-1], *inner] if prompt else inner
    assert codec.document("x") == codec.encode("x") + document[-1:]
    assert codec.around.end == document[-1]


def test_nothing_is_put_twice_around_a_text():
    codec = TokenizerCodec(metaspace())
    plain, brought = codec.document("def x"), codec.document("<s>def x</s>")
    assert plain == [1, 4, 10, 2] and brought.count(1) == brought.count(2) == 1
    assert codec.encode("") == [1] and codec.document("") == [1, 2]


def test_a_special_token_that_stands_for_the_unknown_is_not_taken_for_the_beginning():
    words = Tokenizer(WordLevel({"<end>": 0, "one": 1}, unk_token="<end>"))
    words.post_processor = template("<end> $A", end=0)
    one_for_all = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<end>")
    codec = TokenizerCodec(PreTrainedTokenizerFast(tokenizer_object=words, **one_for_all))
    assert (codec.around.before, codec.around.after, codec.around.end) == ([0], [0], 0)
    assert codec.document("one") == [0, 1, 0]


@pytest.fixture(scope="module")
def always_ends():
    """A model of `metaspace` whose next token is `<|end|>`, whatever comes before it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(vocab_size=14, max_position_embeddings=64, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        for block in model.model.layers:  # so that the last hidden state stays the embedding's, all of it positive
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        model.lm_head.weight[3] = 1.0
    return model


@pytest.mark.parametrize("stop", [3, [3, 3], "<|end|>", "<|end|><|end|>"], ids=str)
def test_special_tokens_end_a_completion_as_ids_and_as_text(always_ends, stop):
    engine = DecodeEngine(always_ends, max_batch_size=1, codec=TokenizerCodec(metaspace()), graphs=False)
    (done,) = engine.generate(["def x"], max_new_tokens=10, stop=[stop])
    assert done.finish_reason == "stop" and len(done.tokens) == (1 if stop in (3, "<|end|>") else 2)
    assert done.text == "" and done.prompt == [1, 4, 10]


def test_who_makes_the_text_of_tokens_need_not_have_it_made(always_ends):
    engine = DecodeEngine(always_ends, max_batch_size=1, codec=TokenizerCodec(metaspace()), graphs=False)
    handles = [engine.submit("def x", max_new_tokens=10, stop=["<|end|>"], text=text) for text in (True, False)]
    while engine.unfinished:
        engine.step()
    (made,), (left,) = (handle.completions for handle in handles)
    assert (made.text, left.text) == ("", None) and made.tokens == left.tokens


def test_a_stop_that_never_comes_or_is_in_the_prompt_ends_nothing(always_ends):
    engine = DecodeEngine(always_ends, max_batch_size=1, codec=TokenizerCodec(metaspace()), graphs=False)
    for stop in ("def", "x", ">", "end", "</s>", " END"):
        (done,) = engine.generate(["def x"], max_new_tokens=4, stop=[stop])
        assert (done.finish_reason, len(done.tokens)) == ("length", 4), stop


def test_the_codec_says_what_ends_a_text_where_the_model_does_not(always_ends):
    tokenizer = metaspace()
    tokenizer.eos_token = "<|end|>"
    for codec, reason in ((TokenizerCodec(tokenizer), "stop"), (None, "length")):
        engine = DecodeEngine(always_ends, max_batch_size=1, codec=codec, graphs=False)
        assert engine.generate([[4, 10]], max_new_tokens=4)[0].finish_reason == reason


def met_at(codec, stop, prompt, tokens):
    """The first token with which a stop is met; None for none."""
    stops = StopTexts(codec, [stop], prompt)
    return next((index for index, token in enumerate(tokens) if stops.met(token)), None)


@pytest.mark.parametrize(
    ("stop", "at"),
    [(" x\n", 1), ("\n    return", 3), ("\n", 1), ("    ", 2), ("return x", 4), ("f(): x", None), ("x x", None)],
)
def test_spaces_and_lines_in_a_stop_are_found_where_they_are(stop, at):
    codec = TokenizerCodec(metaspace())
    tokens = codec.tokenizer.convert_tokens_to_ids(["▁x", "\n", "▁▁▁▁", "return", "▁x"])
    assert met_at(codec, stop, codec.encode("def f():"), tokens) == at


def test_a_line_break_that_is_a_byte_ends_a_completion_at_once():
    codec = TokenizerCodec(llama_like())
    letter = codec.encode("b")[-1]
    assert met_at(codec, "\n", codec.encode("a"), [letter, 3 + 0x0A, 3 + 0xC3]) == 1


def test_a_stop_is_found_in_every_kind_of_text_when_it_is_complete(tokenizer):
    codec, found = TokenizerCodec(tokenizer), 0
    for seed in range(100):
        prompt, tokens = drawn(tokenizer, seed)
        texts = [completion_text(codec, prompt, tokens[: count + 1]) for count in range(len(tokens))]
        stop = texts[-1][-3:]
        if stop and "\ufffd" not in stop:
            expected = next(index for index, text in enumerate(texts) if stop in text)
            assert met_at(codec, stop, prompt, tokens) == expected
            found += 1
    assert found > 20


def test_a_completion_is_the_text_behind_its_prompt():
    tokenizer = metaspace()
    model = tiny_model("llama", torch.device("cpu"))
    model.resize_token_embeddings(len(tokenizer))
    engine = DecodeEngine(model, max_batch_size=2, codec=TokenizerCodec(tokenizer), graphs=False)
    prompts = ["def x", "def f():"]
    for done in engine.generate(prompts, n=4, temperature=3.0, seed=0, max_new_tokens=20, ignore_eos=True):
        whole = tokenizer.decode(done.prompt + done.tokens, skip_special_tokens=True)
        assert prompts[done.request] + done.text == whole


def test_too_many_stops_are_refused_when_they_are_special_texts_too(always_ends):
    engine = DecodeEngine(always_ends, max_batch_size=1, codec=TokenizerCodec(metaspace()), graphs=False)
    with pytest.raises(RequestError, match="9 stop tokens"):
        engine.generate(["def x"], stop=["<|end|>", "</s>", *range(4, 11)])
