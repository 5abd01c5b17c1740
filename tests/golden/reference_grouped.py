"""The forward pass of the grouped-query families (llama, qwen2, qwen3, qwen3_moe, glm4_moe) in numpy float64, written
from the formulas. It shares no code with transformers; make_goldens_grouped.py holds the two against each other.

The trace is that of reference_model.py.
"""

import json
import math
import os

import numpy as np
from safetensors.numpy import load_file

from cache_rounding import Exact
from reference_model import Trace, best, is_moe, magnitude, mlp, rms_norm, rotate, sigmoid


def turning(config, width):
    """(inverse frequencies of the rotated part, A)."""
    spec = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = spec.get("rope_theta", config.get("rope_theta"))
    kind, factor = spec.get("rope_type", spec.get("type", "default")), spec.get("factor")
    original = spec.get("original_max_position_embeddings")
    f = [theta ** (-2.0 * j / width) for j in range(width // 2)]
    if kind == "linear":
        f = [x / factor for x in f]
    elif kind == "llama3":
        low, high = spec["low_freq_factor"], spec["high_freq_factor"]
        for j, x in enumerate(f):
            wavelength = 2 * math.pi / x
            if wavelength > original / low:
                f[j] = x / factor
            elif wavelength >= original / high:
                s = (original / wavelength - low) / (high - low)
                f[j] = (1 - s) * x / factor + s * x
    elif kind == "yarn":
        turns = lambda n: width * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta))
        low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), width - 1)
        for j, x in enumerate(f):
            slowed = min(max((j - low) / (high - low), 0), 1)
            f[j] = slowed * x / factor + (1 - slowed) * x
        return np.array(f), spec.get("attention_factor") or magnitude(factor, 1)
    else:
        assert kind == "default", kind
    return np.array(f), 1.0


class GroupedModel:
    def __init__(self, config, weights):
        self.c = config
        self.w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
        self.cache = Exact()
        self.eps = config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config.get("head_dim") or config["hidden_size"] // self.heads
        spec = config.get("rope_parameters") or {}
        part = spec.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        self.rotated = int(self.width * part)
        self.inverse_frequency, self.a = turning(config, self.rotated)
        self.scale = self.width**-0.5

    @staticmethod
    def load(folder):
        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
        return GroupedModel(config, load_file(os.path.join(folder, "model.safetensors")))

    def linear(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def forward(self, tokens, inputs=None, kept=None):
        """`inputs`: rows to start from instead of the tokens' embeddings."""
        tokens = np.asarray(tokens)
        positions = np.arange(len(tokens), dtype=np.float64)
        trace = Trace(margins=np.full(len(tokens), math.inf))
        x = self.w["model.embed_tokens.weight"][tokens] if inputs is None else inputs
        for layer in range(self.c["num_hidden_layers"]):
            trace.hidden.append(x)
            p = f"model.layers.{layer}."
            normed = rms_norm(x, self.w[p + "input_layernorm.weight"], self.eps)
            x = x + self.attention(p + "self_attn.", normed, positions, self.window(layer))
            normed = rms_norm(x, self.w[p + "post_attention_layernorm.weight"], self.eps)
            if p + "mlp.gate.weight" in self.w:
                x = x + self.experts(p + "mlp.", normed, layer, trace)
            else:
                x = x + self.mlp(p + "mlp.", normed)
        trace.hidden.append(x)
        head = "model.embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"
        trace.logits = rms_norm(x, self.w["model.norm.weight"], self.eps) @ self.w[head].T
        return trace

    def heads_of(self, p, name, x, positions, turned):
        """[rows][heads][width] of a projection, normed and turned where the family does it."""
        y = self.linear(f"{p}{name}_proj", x).reshape(len(x), -1, self.width)
        if f"{p}{name}_norm.weight" in self.w:
            y = rms_norm(y, self.w[f"{p}{name}_norm.weight"], self.eps)
        if turned:
            r = self.rotated
            y = np.concatenate([rotate(y[..., :r], positions, self.inverse_frequency, self.a, False), y[..., r:]], -1)
        return y

    def window(self, layer):
        """Keys that a row of this layer sees."""
        slides = self.c.get("use_sliding_window") and layer >= self.c["max_window_layers"]
        return self.c["sliding_window"] if slides else math.inf

    def attention(self, p, x, positions, window):
        q, k = (self.heads_of(p, name, x, positions, True) for name in ("q", "k"))
        v = self.heads_of(p, "v", x, positions, False)
        q, (k, v) = self.cache.query(q), self.cache.keys_and_values(k, v)
        out = np.empty((len(x), self.heads, self.width))
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            for t in range(len(x)):
                first = int(max(0, t + 1 - window))
                score = k[first : t + 1, kv] @ q[t, head] * self.scale
                out[t, head] = self.cache.softmax(score) @ v[first : t + 1, kv]
        return self.linear(p + "o_proj", out.reshape(len(x), -1))

    def mlp(self, p, x):
        g = self.linear(p + "gate_proj", x)
        return self.linear(p + "down_proj", g * sigmoid(g) * self.linear(p + "up_proj", x))

    def experts(self, p, x, layer, trace):
        logits = x @ self.w[p + "gate.weight"].T
        softmax = self.c["model_type"] == "qwen3_moe"
        if softmax:
            e = np.exp(logits - logits.max(-1, keepdims=True))
            score = choice = e / e.sum(-1, keepdims=True)
        else:
            score = sigmoid(logits)
            choice = score + self.w[p + "gate.e_score_correction_bias"]
        groups, kept = (1, 1) if softmax else (self.c["n_group"], self.c["topk_group"])
        shared = p + "shared_experts.gate_proj.weight" in self.w
        out = self.mlp(p + "shared_experts.", x) if shared else np.zeros_like(x)
        trace.chosen[layer] = []
        for t in range(len(x)):
            by_group = choice[t].reshape(groups, -1)
            group_scores = np.sort(by_group, -1)[:, -2:].sum(-1)
            allowed, group_gap = best(group_scores, kept)
            masked = np.full_like(by_group, -math.inf)
            masked[allowed] = by_group[allowed]
            chosen, gap = best(masked.reshape(-1), self.c["num_experts_per_tok"])
            trace.margins[t] = min(trace.margins[t], gap, group_gap)
            trace.chosen[layer].append(chosen)
            weight = score[t][chosen]
            if self.c["norm_topk_prob"]:
                weight = weight / weight.sum()
            for e, w in zip(chosen, weight * self.c.get("routed_scaling_factor", 1.0)):
                names = [f"{p}experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down")]
                out[t] += w * mlp(x[t], *(self.w[name] for name in names))
        return out
