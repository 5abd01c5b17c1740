#!/usr/bin/env python3
"""Would the goldens notice? Plants one plausible mistake at a time in the reference model and prints how far the
logits of the short and the long text move from the committed ones. Needs numpy and safetensors only. Fails if a
mistake moves nothing beyond ten times the tolerance that the C++ tests use.
"""

import os
import sys

import numpy as np
from safetensors.numpy import load_file

import reference_model
from reference_model import Model

HERE = os.path.dirname(os.path.abspath(__file__))
TOLERANCE = 2e-4


def attribute(name, value):
    return lambda model: setattr(model, name, value(getattr(model, name)))


def config(**changes):
    return lambda model: model.c.update(changes)


def all_weights(suffix, change):
    def plant(model):
        for name in [n for n in model.w if n.endswith(suffix)]:
            model.w[name] = change(model.w[name])

    return plant


def layer_norm_eps(model):
    original = model.select
    plain = reference_model.layer_norm

    def select(*args):
        reference_model.layer_norm = lambda x, w, b, eps: plain(x, w, b, 1e-5)
        try:
            return original(*args)
        finally:
            reference_model.layer_norm = plain

    model.select = select


def swap_index_rope(model):
    model.index_interleaved = not model.index_interleaved


def rounded_ramp(model):
    spec = {**model.c["rope_parameters"], "truncate": True}
    model.inverse_frequency = reference_model.rope_of({**model.c, "rope_parameters": spec})[0]


V2 = ["deepseek_v2_lite", "deepseek_v2"]
V3 = ["deepseek_v3", "deepseek_v3_plain"]
LITE = ["glm4_moe_lite"]
DSA = ["deepseek_v32", "glm_moe_dsa"]


def shift_selection(model):
    """Shared layers reuse the first full layer's selection instead of the last one's."""
    first = []
    original_select, original_attention = model.select, model.attention

    def select(*args):
        first.append(original_select(*args))
        return first[-1]

    def attention(p, x, c_q, positions, selected):
        layer = int(p.split(".")[2])
        if model.indexers[layer] == "shared":
            selected = first[0]
        return original_attention(p, x, c_q, positions, selected)

    model.select, model.attention = select, attention


def judge_groups_by_two(model):
    original = model.scores

    def scores(p, x):
        score, choice, _ = original(p, x)
        return score, choice, lambda group: np.sort(group)[-2:].sum()

    model.scores = scores


def sigmoid_scores(model):
    model.scores = lambda p, x: (reference_model.sigmoid(x @ model.w[p + "gate.weight"].T),) * 2 + (np.max,)


MISTAKES = [
    ("rms eps 1e-5 ↔ 1e-6", ["glm_moe_dsa", "glm4_moe_lite"], attribute("eps", lambda e: 1e-6)),
    ("latent eps = rms_norm_eps", ["glm_moe_dsa", "glm4_moe_lite"], attribute("latent_eps", lambda e: 1e-5)),
    ("index LayerNorm eps 1e-5", ["glm_moe_dsa"], layer_norm_eps),
    ("index k_norm bias dropped", DSA, all_weights("k_norm.bias", np.zeros_like)),
    ("index rope layout swapped", DSA, swap_index_rope),
    ("main rope layout swapped", V3 + V2 + LITE,
     lambda m: m.c.update(rope_interleave=not m.c.get("rope_interleave", True))),
    ("softmax scale without YaRN", ["deepseek_v3", "deepseek_v32"] + V2,
     lambda m: setattr(m, "scale", (m.c["qk_nope_head_dim"] + m.c["qk_rope_head_dim"]) ** -0.5)),
    ("cosines without A", ["deepseek_v32", "deepseek_v2"], attribute("a", lambda a: 1.0)),
    ("frequencies not slowed", ["deepseek_v3", "deepseek_v32"] + V2,
     attribute("inverse_frequency", lambda f: 10000.0 ** (-np.arange(len(f)) / len(f)))),
    ("ramp of frequencies rounded", ["deepseek_v2"], rounded_ramp),
    ("expert groups ignored", ["deepseek_v3", "deepseek_v32", "deepseek_v2"], config(n_group=1, topk_group=1)),
    ("groups judged by their two best", ["deepseek_v2"], judge_groups_by_two),
    ("sigmoid in the place of softmax", V2, sigmoid_scores),
    ("expert bias dropped", V3 + LITE + DSA, all_weights("e_score_correction_bias", np.zeros_like)),
    ("weights always normalised", ["deepseek_v3_plain"] + V2, config(norm_topk_prob=True)),
    ("weights never normalised", ["deepseek_v3"] + LITE + DSA, config(norm_topk_prob=False)),
    ("expert scale 1", ["deepseek_v2"] + V3 + LITE + DSA, config(routed_scaling_factor=1.0)),
    ("no selection at all", DSA, config(index_topk=1 << 20)),
    ("one key more selected", DSA, lambda m: m.c.update(index_topk=m.c["index_topk"] + 1)),
    ("layer 5 reuses the first selection", ["glm_moe_dsa"], shift_selection),
]


def main(mistakes, load):
    """load(folder) gives the reference model of a golden checkpoint."""
    failed = False
    for what, families, plant in mistakes:
        for family in families:
            folder = os.path.join(HERE, family)
            golden = load_file(os.path.join(folder, "golden.safetensors"))
            moved = 0.0
            for text in ("short", "long"):
                if text + ".tokens" in golden:
                    model = load(folder)
                    plant(model)
                    logits = model.forward(golden[text + ".tokens"]).logits
                    moved = max(moved, np.abs(logits - golden[text + ".logits.full"]).max())
            verdict = "" if moved > 10 * TOLERANCE else "   TOO SMALL"
            failed |= bool(verdict)
            print(f"{family:18} {what:44} {moved:9.2e}{verdict}")
    sys.exit(failed)


if __name__ == "__main__":
    main(MISTAKES, Model.load)
