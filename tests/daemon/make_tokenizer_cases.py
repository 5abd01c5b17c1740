"""Makes data/tokenizer_cases.json: small byte-level BPE tokenizers and the ids that the `tokenizers` package gives.

Run by hand, once, in a throw-away virtual environment:  pip install tokenizers==0.23.3
One vocabulary is trained; the variants change the parts around it. The file holds the base tokenizer, what each
variant overrides, the texts, and per variant the ids of every text, with and without the template.
"""

import copy
import json
import pathlib
import random

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

R3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
      r"|\s+(?!\S)|\s+")
RD = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
      r"|\s*[\r\n]+|\s+(?!\S)|\s+")
CJK = "[一-龥぀-ゟ゠-ヿ]+"

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dogs, there and here",
    "You may copy and distribute verbatim copies of the Program's source code as you receive it.",
    "def step(now, events):\n    return plan\n\nfor (int i = 0; i < 10; ++i) { total += values[i]; }",
    "Größe, Straße, façade, naïve, déjà vu; 12345 67890 3.14159 2^20",
    "東京は日本の首都です。カタカナとひらがな。今天天气很好。",
    "I'm sure that they'll say it's what we've done, and you're right; she'd agree. IT'S",
] * 3


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def added(i, content, special, **flags):
    token = {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": not special, "special": special}
    return {**token, **flags}


def base():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=560, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    root = json.loads(tokenizer.to_str())
    n = len(root["model"]["vocab"])
    root["added_tokens"] = [
        added(n, "<|end|>", True),
        added(n + 1, "<|end|>of<|text|>", True),
        added(n + 2, "<pad>", True, lstrip=True),
        added(n + 3, "<mask>", True, rstrip=True),
        added(n + 4, "word", False, single_word=True),
        added(n + 5, "<｜start▁here｜>", True),
        added(n + 6, "  both  ", False, lstrip=True, rstrip=True),
        added(n + 7, "wordy", False),
    ]
    return root, n


def variants(root, n):
    strings = ["%s %s" % tuple(m) if isinstance(m, list) else m for m in root["model"]["merges"]]
    old_model = {**root["model"], "merges": strings}
    template = {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                           {"SpecialToken": {"id": "<pad>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [n], "tokens": ["<|end|>"]},
                                   "<pad>": {"id": "<pad>", "ids": [n + 2], "tokens": ["<pad>"]}}}
    return {
        "gpt2": {"pre_tokenizer": byte_level(True)},
        "no_regex": {"pre_tokenizer": byte_level(False), "model": old_model},
        "r3_template": {"pre_tokenizer": sequence(split(R3), byte_level(False)),
                        "model": {**root["model"], "ignore_merges": True},
                        "post_processor": {"type": "Sequence", "processors": [byte_level(True), template]}},
        "deepseek": {"pre_tokenizer": sequence(split(r"\p{N}{1,3}"), split(CJK), split(RD), byte_level(False))},
        "digits": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, byte_level(True))},
        "digits_together": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False},
                                                      byte_level(False))},
        "previous": {"pre_tokenizer": sequence(split(" ", "MergedWithPrevious", kind="String"), byte_level(False))},
        "next": {"pre_tokenizer": sequence(split(r"[\s,.]", "MergedWithNext"), byte_level(False))},
        "contiguous": {"pre_tokenizer": sequence(split(r"[a-z]", "Contiguous"), byte_level(False))},
        "removed": {"pre_tokenizer": sequence(split(r"\s+", "Removed"), byte_level(False))},
        "inverted": {"pre_tokenizer": sequence(split(r"\w+|[^\w\s]+", "Removed", invert=True), byte_level(False))},
    }


def texts(seed=20240501):
    random.seed(seed)
    out = ["", " ", "   ", "\n", "\r\n\r\n", "\t \n x", "a", "word", "swordfish word words", "Hello,  world!   ",
           "x<|end|>y", "<|end|>of<|text|>", "<|end|>of<|tex", "a <pad> b", "a  <pad><pad>  b", "a <mask>   b <mask>",
           "<｜start▁here｜>你好", "wordy word", "keyword word_ word-word 語word", "a   both   b", "  both  ",
           "It's I'LL we'Ve 'tis ſ's", "1 12 123 1234 12345 1234567890", "３４５ ⅷ ½ ٣٤", "e\u0301 \u0308a n\u0303o",
           "👩‍👩‍👧‍👦 👍🏽 🇩🇪", "東京は日本の首都です。カタカナ", "한국어 조선말", "Ελληνικά, Русский, العربية", "नमस्ते दुनिया",
           "a\u00a0b\u2003c\u3000d\u2028e\u0085f", "tab\tsep\tvalues\n\n\nend\n", "if (a<b&&c>d) {x[i]=~y;}", "\u0000\u0001\u007f",
           "\ufeffbom", "the" * 40, "there" + " " * 50 + "there", "\n" * 30 + "x", "....!!!??", "ab" * 100]
    pieces = ["the ", "there", " and", "copy", " distribute", "’s", "'s", "'ll ", "word", " word ", "<pad>", "<|end|>",
              " ", "  ", "\n", "\r\n", "\t", "12", "345", "6789", "é", "e\u0301", "ß", "東京", "です", "カナ", "。", ",", ".",
              "!?", "{", "}", "_", "-", "👍", "🏽", "Q", "zz", "über", "<mask>", "of", "\u00a0", "한", "ф"]
    for _ in range(260):
        out.append("".join(random.choice(pieces) for _ in range(random.randint(1, 14))))
    return out


def main():
    root, n = base()
    lines = texts()
    result = {"made_with": "tokenizers " + tokenizers.__version__, "base": root, "texts": lines, "variants": []}
    for name, override in variants(root, n).items():
        tokenizer = Tokenizer.from_str(json.dumps({**copy.deepcopy(root), **override}))
        result["variants"].append({
            "name": name, "override": override,
            "ids": [tokenizer.encode(t).ids for t in lines],
            "ids_plain": [tokenizer.encode(t, add_special_tokens=False).ids for t in lines] if "post_processor" in override
            else None,
        })
    path = pathlib.Path(__file__).parent / "data" / "tokenizer_cases.json"
    path.write_text(json.dumps(result, ensure_ascii=True, separators=(",", ":")))


main()
