#!/usr/bin/env python3
"""Makes cached.safetensors: logits of the reference models with each FP8 cache form, on texts of their own.

    python3 make_goldens_cached.py        # needs numpy and safetensors alone

FORM.tokens and FORM.logits. A row of a text is accepted if no choice and no E4M3 rounding in it is close: float32
noise must decide neither. Queries are rounded to bf16 in such a cache; a rounding there may go the other way, which
the tolerance of cached_test.cc allows for.
"""

import os

import numpy as np
from safetensors.numpy import load_file, save_file

from cache_rounding import Exact, Fp8
from reference_grouped import GroupedModel
from reference_model import Model

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENS = 40
ROUNDING_GAP, CHOICE_GAP = 5e-6, 4e-3

FORMS = {
    "glm_moe_dsa": {"fp8_ds_mla": Fp8(True), "fp8": Fp8(False, True, True)},
    "deepseek_v3": {"fp8_ds_mla": Fp8(True), "fp8": Fp8(False)},
    "llama_smol": {"fp8": Fp8(False)},
}


def forward(model, tokens):
    model.cache.nearest = None
    trace = model.forward(tokens)
    return trace, (trace.margins > CHOICE_GAP) & (model.cache.nearest > ROUNDING_GAP)


def text(model, rng):
    """Random tokens, where a row that is too close to call gets another token (rows before it cannot change)."""
    tokens = rng.integers(2, model.c["vocab_size"], TOKENS)
    while True:
        trace, clear = forward(model, tokens)
        if clear.all():
            return tokens, trace
        tokens[np.flatnonzero(~clear)[0]] = rng.integers(2, model.c["vocab_size"])


def main():
    for name, forms in FORMS.items():
        folder = os.path.join(HERE, name)
        model = (GroupedModel if name.startswith("llama") else Model).load(folder)
        golden, out = load_file(os.path.join(folder, "golden.safetensors")), {}
        assert np.abs(model.forward(golden["short.tokens"]).logits - golden["short.logits.full"]).max() < 1e-4
        for form, rounding in forms.items():
            model.cache = rounding
            tokens, trace = text(model, np.random.default_rng(sum(map(ord, name + form))))
            model.cache = Exact()
            effect = np.abs(model.forward(tokens).logits - trace.logits).max()
            out[form + ".tokens"] = tokens.astype(np.int32)
            out[form + ".logits"] = trace.logits.astype(np.float32)
            print(f"{name} {form}: the cache moves logits by up to {effect:.2f}")
        save_file(out, os.path.join(folder, "cached.safetensors"))


if __name__ == "__main__":
    main()
