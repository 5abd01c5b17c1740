#!/usr/bin/env python3
"""Makes smollm2.json: what `transformers` (float32, CPU, eager attention) answers to 20 prompts with the weights that
tools/models/smollm2.sh writes, and the ids that `tokenizers` gives for a few hundred strings.

    python3 -m venv /tmp/goldens && /tmp/goldens/bin/pip install -r ../golden/requirements.txt
    /tmp/goldens/bin/python make_smollm2.py FOLDER

Answers are greedy, 32 tokens, and go on after an end-of-text token. Beside each token stands the gap between the best
logit and the next: where it is tiny, rounding may decide otherwise. Long prompts are slices of one text, made of the
project's own documents.
"""

import json
import pathlib
import re
import sys

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
ANSWER = 32

PLAIN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Q: What do bees make?\nA:",
    "東京は日本の首都",
    "Water boils at 100 °C 🙂 and freezes at",
]
QUESTIONS = [
    "Why is the sky blue? Answer in three sentences.",
    "Write a haiku about rain.",
    "Give me three reasons to sleep enough.",
    "What is 7 times 8?",
    "Translate 'good morning' into French.",
]
# Tokens of the slices, and where in the text they begin.
LONG = [(300, 0), (511, 0.1), (512, 0.2), (777, 0.3), (1024, 0.35), (1700, 0.2), (2900, 0.1), (4000, 0)]


def asked(question):
    return ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def long_text():
    """Prose of our documents, tables and code left out."""
    paragraphs = []
    for name in ["README.md", "docs/architecture.md", "worker/model/README.md", "docs/gpu.md", "daemon/README.md",
                 "tests/README.md", "kernels/README.md", "controlplane/README.md", "docs/benchmarks.md"]:
        for paragraph in re.split(r"\n\s*\n", (ROOT / name).read_text()):
            if not re.match(r"\s*[|`<#]", paragraph) and "```" not in paragraph and "|" not in paragraph:
                paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


@torch.no_grad()
def answer(model, ids):
    tokens, gaps, cache = [], [], DynamicCache(config=model.config)
    step = ids
    for _ in range(ANSWER):
        # Only the last row's logits.
        logits = model(torch.tensor([step]), cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        best = torch.topk(logits, 2)
        tokens.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step = [tokens[-1]]
    return tokens, gaps


def prompts_of(tokenizer):
    text = long_text()
    prompts = [("text", prompt) for prompt in PLAIN + [asked(question) for question in QUESTIONS]]
    for count, share in LONG:
        begin = int(share * len(text))
        encoded = tokenizer.encode(text[begin:])
        end = begin + encoded.offsets[count - 1][1]
        assert len(encoded.ids) >= count, "the documents are too short"
        prompts.append(("slice", [begin, end]))
    return text, prompts


def main():
    folder = sys.argv[1]
    tokenizer = tokenizers.Tokenizer.from_file(folder + "/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    torch.set_num_threads(1)
    text, prompts = prompts_of(tokenizer)
    out = {"made_with": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__,
                         "torch": torch.__version__},
           "long_text": text, "prompts": []}
    for kind, value in prompts:
        ids = tokenizer.encode(value if kind == "text" else text[value[0]:value[1]]).ids
        tokens, gaps = answer(model, ids)
        if kind == "slice":  # from characters to bytes
            value = [len(text[:at].encode()) for at in value]
        out["prompts"].append({kind: value, "prompt_tokens": len(ids), "answer": tokens, "gaps": gaps})
        print(len(ids), "tokens, smallest gap", min(gaps), repr(tokenizer.decode(tokens)[:70]), flush=True)
    cases = json.loads((ROOT / "tests/daemon/data/tokenizer_cases.json").read_text())
    # Control characters and planes that the vocabulary has no bytes for, and its added tokens.
    texts = cases["texts"] + ["a\x04b\x06\x13\x14\x16\x1dc", "x\U00040000y\U000F0000", asked("Hi?"), "<|im_end|>x<repo_name>",
                              text[:2000], text]
    out["tokenizer"] = [{"text": one, "ids": tokenizer.encode(one).ids} for one in texts[len(cases["texts"]):-1]]
    out["tokenizer_case_ids"] = [tokenizer.encode(one).ids for one in cases["texts"]]
    out["long_text_ids"] = tokenizer.encode(text).ids
    (HERE / "smollm2.json").write_text(json.dumps(out, ensure_ascii=True, separators=(",", ":")) + "\n")


main()
