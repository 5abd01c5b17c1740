"""The forward pass of the served families in numpy float64, written from the formulas, one row at a time
where that is clearest. It shares no code with transformers; make_goldens.py holds the two against each other.

It computes MLA in its absorbed form (the form the runtime uses), and keeps a trace by layer, so that a wrong
kernel can be found by the first value that differs:

    model = Model.load("tests/golden/glm_moe_dsa")
    trace = model.forward(tokens)
    trace.logits, trace.hidden[layer], trace.selected[layer][row], trace.chosen[layer][row]

hidden[i] is the residual before layer i; hidden[layer_count] is the one before the final norm.
"""

import json
import math
import os
from dataclasses import dataclass, field

import numpy as np

from cache_rounding import Exact


@dataclass
class Trace:
    logits: np.ndarray = None
    hidden: list = field(default_factory=list)
    selected: dict = field(default_factory=dict)  # layer → per row: ascending positions
    chosen: dict = field(default_factory=dict)  # layer → per row: ascending experts
    # Per row: the smallest gap between the last chosen and the first rejected, over everything chosen anywhere.
    margins: np.ndarray = None


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def mlp(x, gate, up, down):
    g = x @ gate.T
    return (g * sigmoid(g) * (x @ up.T)) @ down.T


def magnitude(factor, m):
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def rope_of(config):
    """(inverse frequencies, A, factor by which the softmax scale grows)."""
    spec = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = spec.get("rope_theta", config.get("rope_theta", 10000.0))
    width = config["qk_rope_head_dim"]
    plain = theta ** (-2.0 * np.arange(width // 2) / width)
    kind = spec.get("rope_type", spec.get("type", "default"))
    if kind == "default":
        return plain, 1.0, 1.0
    assert kind == "yarn", kind
    factor, original = spec["factor"], spec["original_max_position_embeddings"]

    def pair_that_turns(count):
        return width * math.log(original / (2 * math.pi * count)) / (2 * math.log(theta))

    low, high = pair_that_turns(spec.get("beta_fast") or 32), pair_that_turns(spec.get("beta_slow") or 1)
    if spec.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slowed = np.clip((np.arange(width // 2) - low) / (high - low or 0.001), 0, 1)
    all_dim, m = spec.get("mscale_all_dim"), spec.get("mscale")
    a = spec.get("attention_factor")
    if a is None:
        a = magnitude(factor, m) / magnitude(factor, all_dim) if m and all_dim else magnitude(factor, 1)
    return slowed * plain / factor + (1 - slowed) * plain, a, magnitude(factor, all_dim) ** 2 if all_dim else 1.0


def is_moe(config, layer):
    kinds = config.get("mlp_layer_types")
    if kinds:
        return kinds[layer] == "sparse"
    return layer >= config["first_k_dense_replace"] and layer % config.get("moe_layer_freq", 1) == 0


def rotate(x, positions, inverse_frequency, a, interleaved):
    """x [rows, …, width]: pairs (2j, 2j+1) if interleaved, else (j, j + width/2); the layout stays as it was."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * inverse_frequency[None, :]
    shape = (len(positions),) + (1,) * (x.ndim - 2) + (half,)
    cos, sin = (np.cos(angle) * a).reshape(shape), (np.sin(angle) * a).reshape(shape)
    out = np.empty_like(x)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def best(values, count):
    """Indices of the `count` largest, ties to the lower index, ascending; and the gap to the best rejected."""
    order = np.lexsort((np.arange(len(values)), -values))
    gap = values[order[count - 1]] - values[order[count]] if count < len(values) else math.inf
    return np.sort(order[:count]), gap


class Model:
    def __init__(self, config, weights):
        self.c = config
        self.w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
        self.eps = config["rms_norm_eps"]
        self.cache = Exact()  # cache_rounding.py: what is kept of entries, index keys and queries
        self.latent_eps = 1e-6  # transformers builds both latent norms with its class default
        self.inverse_frequency, self.a, growth = rope_of(config)
        self.scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * growth
        self.sparse = "index_topk" in config
        self.softmax_router = config["model_type"] == "deepseek_v2"
        self.index_interleaved = config["model_type"] == "glm_moe_dsa"
        kinds = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
        self.indexers = kinds if self.sparse else []

    @staticmethod
    def load(folder):
        from safetensors.numpy import load_file

        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
        weights = {}
        for name in sorted(os.listdir(folder)):
            if name.startswith("model") and name.endswith(".safetensors"):
                weights.update(load_file(os.path.join(folder, name)))
        return Model(config, split_experts(weights))

    def forward(self, tokens, inputs=None, kept=None):
        """`inputs`: rows to start from instead of the tokens' embeddings. `kept`: later rows read what this one chose."""
        tokens = np.asarray(tokens)
        positions = np.arange(len(tokens), dtype=np.float64)
        trace = Trace(margins=np.full(len(tokens), math.inf))
        x = self.w["model.embed_tokens.weight"][tokens] if inputs is None else inputs
        selected = None
        for layer in range(self.c["num_hidden_layers"]):
            trace.hidden.append(x)
            p = f"model.layers.{layer}."
            normed = rms_norm(x, self.w[p + "input_layernorm.weight"], self.eps)
            c_q = self.query_latent(p + "self_attn.", normed)
            if self.sparse and self.indexers[layer] == "full":
                selected = self.select(p + "self_attn.indexer.", normed, c_q, positions, trace.margins)
                if kept is not None:
                    selected[kept + 1 :] = [selected[kept]] * (len(selected) - kept - 1)
            if self.sparse:
                trace.selected[layer] = selected
            x = x + self.attention(p + "self_attn.", normed, c_q, positions, selected)
            normed = rms_norm(x, self.w[p + "post_attention_layernorm.weight"], self.eps)
            if not is_moe(self.c, layer):
                x = x + mlp(normed, *self.mlp_weights(p + "mlp."))
            else:
                x = x + self.experts(p + "mlp.", normed, layer, trace)
        trace.hidden.append(x)
        head = "model.embed_tokens.weight" if self.c.get("tie_word_embeddings") else "lm_head.weight"
        trace.logits = rms_norm(x, self.w["model.norm.weight"], self.eps) @ self.w[head].T
        return trace

    def query_latent(self, p, x):
        if p + "q_proj.weight" in self.w:
            return x
        return rms_norm(x @ self.w[p + "q_a_proj.weight"].T, self.w[p + "q_a_layernorm.weight"], self.latent_eps)

    def attention(self, p, x, c_q, positions, selected):
        heads, nope, rope = (self.c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        latent, value, rows = self.c["kv_lora_rank"], self.c["v_head_dim"], len(x)
        interleaved = self.c.get("rope_interleave", True)
        q_name = "q_proj.weight" if p + "q_proj.weight" in self.w else "q_b_proj.weight"
        q = (c_q @ self.w[p + q_name].T).reshape(rows, heads, nope + rope)
        q_rope = rotate(q[..., nope:], positions, self.inverse_frequency, self.a, interleaved)
        kv = x @ self.w[p + "kv_a_proj_with_mqa.weight"].T
        c = rms_norm(kv[:, :latent], self.w[p + "kv_a_layernorm.weight"], self.latent_eps)
        k_rope = rotate(kv[:, latent:], positions, self.inverse_frequency, self.a, interleaved)
        kv_b = self.w[p + "kv_b_proj.weight"].reshape(heads, nope + value, latent)
        absorbed = np.einsum("thn,hnr->thr", q[..., :nope], kv_b[:, :nope])  # q̃ = W_UKᵀ q_nope
        c, k_rope = self.cache.latent(c, k_rope)
        absorbed, q_rope = self.cache.query(absorbed), self.cache.query(q_rope)
        out = np.empty((rows, heads, value))
        for t in range(rows):
            keys = selected[t] if selected is not None else np.arange(t + 1)
            score = self.scale * (absorbed[t] @ c[keys].T + q_rope[t] @ k_rope[keys].T)
            z = self.cache.softmax(score) @ c[keys]
            out[t] = np.einsum("hr,hvr->hv", z, kv_b[:, nope:])
        return out.reshape(rows, heads * value) @ self.w[p + "o_proj.weight"].T

    def select(self, p, x, c_q, positions, margins):
        heads, width, rope = self.c["index_n_heads"], self.c["index_head_dim"], self.c["qk_rope_head_dim"]
        q = (c_q @ self.w[p + "wq_b.weight"].T).reshape(len(x), heads, width)
        k = layer_norm(x @ self.w[p + "wk.weight"].T, self.w[p + "k_norm.weight"], self.w[p + "k_norm.bias"], 1e-6)
        for part in (q, k):  # the first `rope` dimensions turn
            part[..., :rope] = rotate(
                part[..., :rope], positions, self.inverse_frequency, self.a, self.index_interleaved
            )
        q, k = self.cache.index(q, k)
        weight = x @ self.w[p + "weights_proj.weight"].T * heads**-0.5 * width**-0.5
        rows = []
        for t in range(len(x)):
            score = weight[t] @ np.maximum(q[t] @ k[: t + 1].T, 0)
            positions_of_row, gap = best(score, min(self.c["index_topk"], t + 1))
            margins[t] = min(margins[t], gap)
            rows.append(positions_of_row)
        return rows

    def mlp_weights(self, p):
        return [self.w[f"{p}{name}_proj.weight"] for name in ("gate", "up", "down")]

    def scores(self, p, x):
        """What weighs an expert, what chooses it, and how a group is judged by what chooses."""
        logits = x @ self.w[p + "gate.weight"].T
        if not self.softmax_router:
            sigma = sigmoid(logits)
            return sigma, sigma + self.w[p + "gate.e_score_correction_bias"], lambda group: np.sort(group)[-2:].sum()
        e = np.exp(logits - logits.max(-1, keepdims=True))
        share = e / e.sum(-1, keepdims=True)
        return share, share, np.max

    def weigh(self, score):
        scale, normalise = self.c["routed_scaling_factor"], self.c.get("norm_topk_prob", not self.softmax_router)
        if normalise and self.softmax_router:
            scale = 1.0  # DeepSeek-V2: normalised or scaled, never both
        return scale * (score / (score.sum() + 1e-20) if normalise else score)

    def experts(self, p, x, layer, trace):
        groups, kept = self.c.get("n_group") or 1, self.c.get("topk_group") or 1
        if self.c.get("topk_method") == "greedy":
            groups = kept = 1
        scores, choice, judge = self.scores(p, x)
        out = mlp(x, *self.mlp_weights(p + "shared_experts."))
        trace.chosen[layer] = []
        for t in range(len(x)):
            by_group = np.array([judge(group) for group in choice[t].reshape(groups, -1)])
            allowed, group_gap = best(by_group, kept)
            masked = np.where(np.repeat(np.isin(np.arange(groups), allowed), len(choice[t]) // groups), choice[t], -math.inf)
            chosen, gap = best(masked, self.c["num_experts_per_tok"])
            trace.margins[t] = min(trace.margins[t], gap, group_gap)
            trace.chosen[layer].append(chosen)
            for e, w in zip(chosen, self.weigh(scores[t][chosen])):
                out[t] += w * mlp(x[t], *self.mlp_weights(f"{p}experts.{e}."))
        return out


def split_experts(weights):
    """The fused spelling (experts.gate_up_proj [E, 2I, d], experts.down_proj [E, d, I]) as one matrix each."""
    out = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base, half = name.removesuffix("gate_up_proj"), value.shape[1] // 2
            for e, both in enumerate(value):
                out[f"{base}{e}.gate_proj.weight"], out[f"{base}{e}.up_proj.weight"] = both[:half], both[half:]
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            out.update({f"{base}{e}.down_proj.weight": one for e, one in enumerate(value)})
        else:
            out[name] = value
    return out
