"""Small tokenizers of the kinds that are in use, made without a download."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "{{ bos_token if loop.first }}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def template(single, **ids):
    return processors.TemplateProcessing(single=single, special_tokens=[(f"<{name}>", ids[name]) for name in ids])


def llama_like(texts=(), vocabulary=400, **settings):
    """As Llama 2 has it: "▁" for spaces, bytes for what is unknown, a decoder that strips the first space; BOS before
    each text and, as some that are trained with have it, EOS behind it."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    made.train_from_iterator([" ".join("abcdefghijklmnopqrstuvwxyz[]:"), "    a", *texts], trainer)
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(strip)
    made.post_processor = template("<s> $A </s>", **{"s": 1, "/s": 2})
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | settings
    return PreTrainedTokenizerFast(tokenizer_object=_bytes_not_special(made, special), **named)


def _bytes_not_special(made, special):
    # The trainer makes everything special that has to be in the vocabulary; a decoder that skips such would skip bytes.
    plain = json.loads(made.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] in special[:3]]
    return Tokenizer.from_str(json.dumps(plain))


def metaspace():
    """Words with "▁" for the space before them, as in sentencepiece; BOS before a text, EOS behind it."""
    words = ["<unk>", "<s>", "</s>", "<|end|>", "▁def", "▁f():", "\n", "▁", "return", "▁▁▁▁", "▁x", "▁END", "a", "b"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.post_processor = template("<s> $A </s>", **{"s": 1, "/s": 2})
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=["<|end|>"], **named)


def byte_level():
    """As GPT-2 has it: BPE of bytes; an end of text that it does not put anywhere by itself."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    settings = {"special_tokens": ["<end>"], "initial_alphabet": letters, "show_progress": False}
    made.train_from_iterator(["one two € three"] * 9, trainers.BpeTrainer(vocab_size=280, **settings))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def word_piece(clean):
    """As BERT has it: [CLS] before a text and [SEP] behind it, no EOS; `clean` removes spaces from the whole text."""
    words = ["[UNK]", "[CLS]", "[SEP]", "a", "##b", ".", ",", "'", "s", "n't", "do", "!"]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=not clean)
    special = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=clean, **named)


class Joined(PreTrainedTokenizer):
    """A slow tokenizer, whose tokens with "@@" change what is behind them when another one comes."""

    words = ("<unk>", "<end>", "hel@@", "lo", "w@@", "or@@", "ld", "\n")

    def __init__(self, **settings):
        super().__init__(unk_token="<unk>", eos_token="<end>", **settings)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index):
        return self.words[index]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens).replace("@@ ", "")


KINDS = {
    "llama_like": llama_like,
    "metaspace": metaspace,
    "byte_level": byte_level,
    "word_piece": lambda: word_piece(clean=False),
    "cleaned": lambda: word_piece(clean=True),
    "slow": Joined,
    "slow_bytes": ByT5Tokenizer,
}


def word_tokenizer(folder, texts):
    """Of whole words, saved in a folder."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<end>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(folder)
    return fast
