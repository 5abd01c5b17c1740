#!/usr/bin/env python3
"""Would the goldens of the grouped-query families notice? As sensitivity.py."""

import numpy as np

from reference_grouped import GroupedModel
from sensitivity import all_weights, attribute, config, main

PLAIN, BIASED, NORMED = ["llama_smol", "llama"], ["llama_bias", "qwen2", "qwen3_moe_plain", "glm4_moe"], ["qwen3", "qwen3_moe", "glm4_moe"]
SCALED = ["llama", "llama_bias", "llama_smol", "qwen3"]
MOE = ["qwen3_moe", "qwen3_moe_plain", "glm4_moe", "glm4_moe_plain"]


def drop(suffix):
    def plant(model):
        for name in [n for n in model.w if n.endswith(suffix)]:
            del model.w[name]

    return plant


def heads_dealt_like_cards(model):
    """Query head i reads KV head i mod Hk."""
    group, kv = model.heads // model.kv_heads, model.kv_heads

    def dealt(w):
        return w.reshape(kv, group, model.width, -1).swapaxes(0, 1).reshape(w.shape)

    def undealt(w):
        return w.reshape(group, kv, model.width, -1).swapaxes(0, 1).reshape(w.shape)

    for name in list(model.w):
        if ".q_proj." in name:
            model.w[name] = undealt(model.w[name])
        elif ".o_proj.weight" in name:
            model.w[name] = undealt(model.w[name].T).T


def interleaved(model):
    """Pairs (2j, 2j + 1) turn."""
    for name in list(model.w):
        if ".q_proj." in name or ".k_proj." in name or name.endswith(("q_norm.weight", "k_norm.weight")):
            w = model.w[name].reshape(-1, model.width, *model.w[name].shape[1:]).copy()
            r = model.rotated
            w[:, :r] = np.concatenate([w[:, 0:r:2], w[:, 1:r:2]], 1)
            model.w[name] = w.reshape(model.w[name].shape)


def norm_after_rope(model):
    original = model.heads_of

    def heads_of(p, name, x, positions, turned):
        key = f"{p}{name}_norm.weight"
        if not turned or key not in model.w:
            return original(p, name, x, positions, turned)
        norm = model.w.pop(key)
        y = original(p, name, x, positions, turned)
        model.w[key] = norm
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + model.eps) * norm

    model.heads_of = heads_of


def turn_everything(model):
    model.rotated = model.width
    model.inverse_frequency = np.repeat(model.inverse_frequency, 2)[: model.width // 2]


MISTAKES = [
    ("heads dealt like cards", ["llama_smol", "llama", "qwen2", "qwen3", "glm4_moe"], heads_dealt_like_cards),
    ("pairs interleaved", PLAIN + NORMED, interleaved),
    ("frequencies not scaled", SCALED,
     lambda m: setattr(m, "inverse_frequency",
                       m.c.get("rope_theta", 10000.0) ** (-2.0 * np.arange(m.rotated // 2) / m.rotated))),
    ("cosines without A", ["llama_bias", "qwen3"], attribute("a", lambda a: 1.0)),
    ("scale by hidden / heads", ["llama", "llama_bias", "qwen3"],
     lambda m: setattr(m, "scale", (m.c["hidden_size"] / m.heads) ** -0.5)),
    ("eps 1e-5 ↔ 1e-6", ["qwen3", "glm4_moe"], attribute("eps", lambda e: 1e-6)),
    ("bias of q dropped", BIASED, drop("q_proj.bias")),
    ("bias of k dropped", BIASED, drop("k_proj.bias")),
    ("bias of v dropped", BIASED, drop("v_proj.bias")),
    ("bias of o dropped", ["llama_bias", "qwen3_moe_plain"], drop("o_proj.bias")),
    ("bias of gate dropped", ["llama_bias"], drop("gate_proj.bias")),
    ("bias of down dropped", ["llama_bias"], drop("down_proj.bias")),
    ("norms of heads dropped", NORMED, lambda m: (drop("q_norm.weight")(m), drop("k_norm.weight")(m))),
    ("weights of q_norm are 1", NORMED, all_weights("q_norm.weight", np.ones_like)),
    ("norm after rope", NORMED, norm_after_rope),
    ("window ignored", ["qwen2_window"], config(use_sliding_window=False)),
    ("window one longer", ["qwen2_window"], config(sliding_window=9)),
    ("window in every layer", ["qwen2_window"], config(max_window_layers=0)),
    ("whole heads turn", ["glm4_moe", "glm4_moe_plain"], turn_everything),
    ("weights always normalised", ["qwen3_moe_plain", "glm4_moe_plain"], config(norm_topk_prob=True)),
    ("weights never normalised", ["qwen3_moe", "glm4_moe"], config(norm_topk_prob=False)),
    ("expert groups ignored", ["glm4_moe"], config(n_group=1, topk_group=1)),
    ("expert bias dropped", ["glm4_moe", "glm4_moe_plain"], all_weights("e_score_correction_bias", np.zeros_like)),
    ("one expert fewer", MOE, lambda m: m.c.update(num_experts_per_tok=m.c["num_experts_per_tok"] - 1)),
]

if __name__ == "__main__":
    main(MISTAKES, GroupedModel.load)
