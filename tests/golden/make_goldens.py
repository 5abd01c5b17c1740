#!/usr/bin/env python3
"""Makes the golden checkpoints: tiny random weights and the logits that transformers gives for them.

    python3 -m venv /tmp/goldens && /tmp/goldens/bin/pip install -r requirements.txt
    /tmp/goldens/bin/python make_goldens.py [--only NAME] [--check]

--check compares a fresh run with the committed files and writes nothing. README.md says what each file holds.

Everything that libraries initialise trivially (norm weights, biases) is random here; weights have deviation
1.5/√fan_in, so attention is far from uniform. A row of tokens is accepted only if every choice that the model makes
on it (experts, groups, selected keys, the greedy token) is decided by a clear gap: float32 noise must not decide.
"""

import argparse
import json
import math
import os
import tempfile

import numpy as np
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from reference_model import Model, is_moe, split_experts

HERE = os.path.dirname(os.path.abspath(__file__))
CHOICE_GAP = 1e-4  # between the last chosen and the first rejected
GREEDY_GAP = 1e-3  # between the best logit and the next
SHORT, LONG, GREEDY = 56, 220, 24  # tokens of the two texts; tokens that continue the short one

COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "float32",
}

FAMILIES = {
    # Four expert groups, YaRN in the older spelling, one file, one tensor per expert matrix.
    "deepseek_v3": dict(
        COMMON, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], vocab_size=500, hidden_size=64,
        intermediate_size=576, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=8, n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
        first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=24,
        qk_rope_head_dim=16, v_head_dim=20, rms_norm_eps=1e-6, tie_word_embeddings=False, rope_interleave=True,
        rope_theta=10000.0,
        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=32, beta_slow=1,
                          mscale=1.0, mscale_all_dim=1.0),
    ),
    # Without q_lora_rank, half-split rope, no scaling, no groups, weights not normalised.
    "deepseek_v3_plain": dict(
        COMMON, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], vocab_size=256, hidden_size=48,
        intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=8, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.25, scoring_func="sigmoid", topk_method="noaux_tc",
        first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=10, rms_norm_eps=1e-6, tie_word_embeddings=False, rope_interleave=False,
        rope_theta=10000.0, rope_scaling=None,
    ),
    # 16 heads, selection of 12, tied embeddings, fused expert tensors, A ≠ 1 (mscale ≠ mscale_all_dim).
    "deepseek_v32": dict(
        COMMON, model_type="deepseek_v32", architectures=["DeepseekV32ForCausalLM"], vocab_size=512, hidden_size=80,
        intermediate_size=160, moe_intermediate_size=40, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=16, n_shared_experts=2, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
        first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=56, kv_lora_rank=32, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=20, index_n_heads=8, index_head_dim=32, index_topk=12, rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_theta=10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=1024,
                             beta_fast=32, beta_slow=1, mscale=0.8, mscale_all_dim=1.0),
    ),
    # V2-Lite: no q_lora_rank, greedy softmax routing, two shared experts, YaRN's 0.707 in the older spelling;
    # the long text passes the original context.
    "deepseek_v2_lite": dict(
        COMMON, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], vocab_size=320, hidden_size=64,
        intermediate_size=168, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=8, n_shared_experts=2, n_routed_experts=12, num_experts_per_tok=3, n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax", topk_method="greedy",
        first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_theta=10000.0,
        rope_scaling=dict(type="yarn", factor=32, original_max_position_embeddings=128, beta_fast=32, beta_slow=1,
                          mscale=0.707, mscale_all_dim=0.707),
    ),
    # V2: q_lora_rank, four groups judged by their best, scale 16, every second layer dense, YaRN in the newer spelling
    # without rounding and with a given A.
    "deepseek_v2": dict(
        COMMON, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], vocab_size=256, hidden_size=64,
        intermediate_size=136, moe_intermediate_size=16, num_hidden_layers=5, num_attention_heads=16,
        num_key_value_heads=16, n_shared_experts=2, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        norm_topk_prob=False, routed_scaling_factor=16.0, scoring_func="softmax", topk_method="group_limited_greedy",
        first_k_dense_replace=1, moe_layer_freq=2, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=12, v_head_dim=10, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=dict(rope_theta=10000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=128,
                             beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707, truncate=False,
                             attention_factor=1.1),
    ),
    # 10 heads, which no number of ranks but 2 divides; layer kinds as a list; eps 1e-5 where it shows; dv > dn.
    "glm4_moe_lite": dict(
        COMMON, model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"], vocab_size=320, hidden_size=64,
        intermediate_size=144, moe_intermediate_size=24, num_hidden_layers=4, num_attention_heads=10,
        num_key_value_heads=10, n_shared_experts=1, n_routed_experts=12, num_experts_per_tok=4, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.8, topk_method="noaux_tc",
        mlp_layer_types=["dense", "sparse", "dense", "sparse"], q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=20, rms_norm_eps=1e-5, tie_word_embeddings=False, partial_rotary_factor=1.0,
        rope_theta=1000000.0, rope_scaling=None,
    ),
    # Layers that share a selection, eps 1e-5 with small activations where it shows, dv > dn, three shards.
    "glm_moe_dsa": dict(
        COMMON, model_type="glm_moe_dsa", architectures=["GlmMoeDsaForCausalLM"], vocab_size=512, hidden_size=64,
        intermediate_size=192, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, n_shared_experts=1, n_routed_experts=12, num_experts_per_tok=3, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
        first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=24, index_n_heads=8, index_head_dim=16, index_topk=16, rms_norm_eps=1e-5,
        tie_word_embeddings=False, indexer_rope_interleave=True,
        indexer_types=["full", "full", "shared", "shared", "full", "shared"],
        rope_parameters=dict(rope_theta=1000000.0, rope_type="default"),
    ),
}


def make_weights(c, rng):
    def matrix(rows, columns, gain=1.0):
        return (rng.standard_normal((rows, columns)) * gain * 1.5 / math.sqrt(columns)).astype(np.float32)

    def norm(width):
        return rng.uniform(0.8, 1.2, width).astype(np.float32)

    def mlp(prefix, width):
        w[prefix + "gate_proj.weight"] = matrix(width, d)
        w[prefix + "up_proj.weight"] = matrix(width, d)
        w[prefix + "down_proj.weight"] = matrix(d, width)

    d, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    head, r, r_q = c["qk_nope_head_dim"] + rope, c["kv_lora_rank"], c["q_lora_rank"]
    # Small activations in front of a norm make its epsilon count.
    small = 0.01 if c["rms_norm_eps"] > 1e-6 else 1.0
    gain = 0.7 if c["tie_word_embeddings"] else 2.0 * small
    w = {"model.embed_tokens.weight": matrix(c["vocab_size"], d, gain)}
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        w[p + "input_layernorm.weight"], w[p + "post_attention_layernorm.weight"] = norm(d), norm(d)
        if r_q is None:
            w[a + "q_proj.weight"] = matrix(heads * head, d)
        else:
            w[a + "q_a_proj.weight"], w[a + "q_a_layernorm.weight"] = matrix(r_q, d, small), norm(r_q)
            w[a + "q_b_proj.weight"] = matrix(heads * head, r_q)
        w[a + "kv_a_proj_with_mqa.weight"] = np.concatenate([matrix(r, d, small), matrix(rope, d)])
        w[a + "kv_a_layernorm.weight"] = norm(r)
        w[a + "kv_b_proj.weight"] = matrix(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), r)
        w[a + "o_proj.weight"] = matrix(d, heads * c["v_head_dim"])
        if "index_topk" in c and c.get("indexer_types", ["full"] * 99)[layer] == "full":
            hi, di = c["index_n_heads"], c["index_head_dim"]
            w[a + "indexer.wq_b.weight"] = matrix(hi * di, r_q)
            w[a + "indexer.wk.weight"] = matrix(di, d, 0.3 * small)
            w[a + "indexer.k_norm.weight"] = norm(di)
            w[a + "indexer.k_norm.bias"] = rng.uniform(-0.1, 0.1, di).astype(np.float32)
            w[a + "indexer.weights_proj.weight"] = matrix(hi, d)
        if not is_moe(c, layer):
            mlp(p + "mlp.", c["intermediate_size"])
            continue
        experts = c["n_routed_experts"]
        w[p + "mlp.gate.weight"] = matrix(experts, d)
        # Positive, so that every biased score beats a zero: implementations differ in how they mask groups.
        if c.get("scoring_func") != "softmax":
            w[p + "mlp.gate.e_score_correction_bias"] = rng.uniform(0.02, 0.22, experts).astype(np.float32)
        for e in range(experts):
            mlp(f"{p}mlp.experts.{e}.", c["moe_intermediate_size"])
        mlp(p + "mlp.shared_experts.", c["n_shared_experts"] * c["moe_intermediate_size"])
    w["model.norm.weight"] = norm(d)
    if not c["tie_word_embeddings"]:
        w["lm_head.weight"] = matrix(c["vocab_size"], d, 0.7)
    return w


def fuse_experts(weights, experts):
    out = {k: v for k, v in weights.items() if ".experts." not in k}
    for base in sorted({k.split("experts.")[0] for k in weights if ".mlp.experts." in k}):
        one = lambda e, name: weights[f"{base}experts.{e}.{name}_proj.weight"]
        out[base + "experts.gate_up_proj"] = np.stack(
            [np.concatenate([one(e, "gate"), one(e, "up")]) for e in range(experts)])
        out[base + "experts.down_proj"] = np.stack([one(e, "down") for e in range(experts)])
    return out


def write_checkpoint(folder, c, weights):
    """weights: numpy arrays, or torch tensors where numpy lacks a type."""
    os.makedirs(folder, exist_ok=True)
    save = safetensors.torch.save_file if any(map(torch.is_tensor, weights.values())) else save_file
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(c, file, indent=2)
        file.write("\n")
    if c["model_type"] == "deepseek_v32":
        weights = fuse_experts(weights, c["n_routed_experts"])
    if c["model_type"] != "glm_moe_dsa":
        save(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        return
    names, count = sorted(weights), 3
    index = {}
    for shard in range(count):  # names dealt like cards: a layer is spread over all files
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        mine = {name: weights[name] for name in names[shard::count]}
        index.update({name: file for name in mine})
        save(mine, os.path.join(folder, file), metadata={"format": "pt"})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        total = sum(value.nbytes for value in weights.values())
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, file, indent=1)
        file.write("\n")


def greedy_gaps(logits):
    top = np.sort(logits, -1)[:, -2:]
    return top[:, 1] - top[:, 0]


def clear_rows(trace):
    return (trace.margins > CHOICE_GAP) & (greedy_gaps(trace.logits) > GREEDY_GAP)


def text_with_gaps(model, count, rng):
    """Random tokens, where a row that is too close to call gets another token (rows before it cannot change)."""
    tokens = rng.integers(2, model.c["vocab_size"], count)
    while True:
        bad = np.flatnonzero(~clear_rows(model.forward(tokens)))
        if not len(bad):
            return tokens
        tokens[bad[0]] = rng.integers(2, model.c["vocab_size"])


def continue_greedily(model, prompt, rng):
    """Returns (prompt, continuation); the prompt's last token changes until every step is clear."""
    while True:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + GREEDY:
            tokens.append(int(model.forward(tokens).logits[-1].argmax()))
        if clear_rows(model.forward(tokens)).all():
            return np.array(prompt), np.array(tokens[len(prompt):])
        prompt = np.array(prompt)
        prompt[-1] = rng.integers(2, model.c["vocab_size"])


def heed_moe_layer_freq():
    """transformers knows no moe_layer_freq; in the code of DeepSeek-V2's authors it makes layers dense."""
    layer_class = modeling_deepseek_v2.DeepseekV2DecoderLayer
    plain = layer_class.__init__

    def init(self, config, layer_idx):
        plain(self, config, layer_idx)
        if layer_idx % config.moe_layer_freq != 0:
            self.mlp = modeling_deepseek_v2.DeepseekV2MLP(config)

    layer_class.__init__ = init


class Hooks:
    """What transformers chose: selected keys and experts by layer, and the residual before each layer."""

    def __init__(self, hf):
        self.selected, self.chosen, self.hidden, self.handles = {}, {}, {}, []
        for i, layer in enumerate(hf.model.layers):
            self.on(layer, lambda m, args, out, i=i: self.hidden.__setitem__(i, args[0][0].numpy()))
            if getattr(layer.self_attn, "indexer", None) is not None:
                self.on(layer.self_attn.indexer, lambda m, args, out, i=i: self.selected.__setitem__(i, out[0].numpy()))
            if hasattr(layer.mlp, "gate"):
                self.on(layer.mlp.gate, lambda m, args, out, i=i: self.chosen.__setitem__(i, out[2].numpy()))
        self.on(hf.model.norm, lambda m, args, out: self.hidden.__setitem__(len(hf.model.layers), args[0][0].numpy()))

    def on(self, module, call):
        self.handles.append(module.register_forward_hook(call))

    def close(self):
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def run_pieces(hf, tokens, pieces):
    cache, at, logits = DynamicCache(config=hf.config), 0, []
    for count in pieces:
        ids = torch.tensor(tokens[at : at + count][None, :])
        logits.append(hf(input_ids=ids, cache=cache, use_cache=True).logits[0].numpy())
        at += count
    assert at == len(tokens)
    return np.concatenate(logits).astype(np.float32)


@torch.no_grad()
def run_full(hf, tokens):
    hooks = Hooks(hf)
    logits = hf(input_ids=torch.tensor(tokens[None, :]), use_cache=False).logits[0].numpy().astype(np.float32)
    hooks.close()
    return logits, hooks


def compare(name, model, tokens, logits, hooks):
    """The reference model against transformers: logits, hidden states, every choice."""
    trace = model.forward(tokens)
    assert clear_rows(trace).all()
    difference = np.abs(trace.logits - logits).max()
    assert difference < 1e-4, (name, difference)
    for i, hidden in hooks.hidden.items():
        assert np.abs(hidden - trace.hidden[i]).max() < 1e-4 * max(1, np.abs(hidden).max()), (name, i)
    for i, rows in hooks.selected.items():
        for t, row in enumerate(rows):
            assert sorted(s for s in row if s <= t) == list(trace.selected[i][t]), (name, i, t)
    for i, rows in hooks.chosen.items():
        assert all(sorted(row) == list(trace.chosen[i][t]) for t, row in enumerate(rows)), (name, i)
    print(f"  {name}: reference − transformers, max abs {difference:.2e}; smallest choice gap {trace.margins.min():.2e}, "
          f"greedy gap {greedy_gaps(trace.logits).min():.2e}, |logit| up to {np.abs(logits).max():.1f}")
    return trace


def padded(rows, width):
    out = np.full((len(rows), width), -1, np.int32)
    for t, row in enumerate(rows):
        out[t, : len(row)] = row
    return out


def load_transformers(c, weights):
    """transformers with these weights and without what config.json says of quantisation."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, {k: v for k, v in c.items() if k != "quantization_config"}, weights)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_family(name, folder, c, make, model_class, with_long_text, quantise):
    rng = np.random.default_rng(sum(map(ord, name)))
    weights = make(c, rng)
    stored, weights = quantise(name, c, weights) if quantise else (weights, weights)
    write_checkpoint(folder, c, stored)
    model = model_class(c, weights)
    hf = load_transformers(c, weights)
    assert sum(p.numel() for p in hf.parameters()) == sum(
        v.size for k, v in weights.items() if "e_score_correction_bias" not in k), "transformers left weights out"
    for layer in hf.model.layers:  # some versions leave YaRN's square out of deepseek_v2
        assert abs(layer.self_attn.scaling / model.scale - 1) < 1e-6, "transformers scales the scores otherwise"
    print(name)

    short, continuation = continue_greedily(model, text_with_gaps(model, SHORT, rng), rng)
    out = {"short.tokens": short.astype(np.int32), "greedy.tokens": continuation.astype(np.int32)}
    full, hooks = run_full(hf, short)
    trace = compare("short", model, short, full, hooks)
    out["short.logits.full"] = full
    first = len(short) * 2 // 3
    out["short.logits.steps"] = run_pieces(hf, short, [first] + [1] * (len(short) - first))
    out["short.logits.chunks"] = run_pieces(hf, short, [7, 24, 5, len(short) - 36])
    for key in ("steps", "chunks"):
        assert np.abs(out["short.logits." + key] - full).max() < 1e-4, key
    for i, hidden in sorted(hooks.hidden.items()):
        out[f"short.hidden.{i}"] = np.ascontiguousarray(hidden, np.float32)
    for i, rows in trace.selected.items():
        out[f"short.selected.{i}"] = padded(rows, c["index_topk"])
    for i, rows in trace.chosen.items():
        out[f"short.experts.{i}"] = padded(rows, c["num_experts_per_tok"])

    whole = np.concatenate([short, continuation])
    compare("greedy", model, whole, *run_full(hf, whole))
    generated = hf.generate(torch.tensor(short[None, :]), attention_mask=torch.ones(1, len(short)), do_sample=False,
                            max_new_tokens=GREEDY, eos_token_id=None, pad_token_id=0)[0, len(short):].numpy()
    assert (generated == continuation).all(), "generate() disagrees"

    if with_long_text:
        long = text_with_gaps(model, LONG, rng)
        out["long.tokens"] = long.astype(np.int32)
        out["long.logits.full"], hooks = run_full(hf, long)
        compare("long", model, long, out["long.logits.full"], hooks)
    save_file(out, os.path.join(folder, "golden.safetensors"))


def same(fresh, committed):
    for name in sorted(os.listdir(fresh)):
        a, b = os.path.join(fresh, name), os.path.join(committed, name)
        if name == "golden.safetensors":  # logits may move by rounding with another machine's matrix library
            x, y = load_file(a), load_file(b)
            assert x.keys() == y.keys()
            for key in x:
                assert (np.isnan(x[key]) == np.isnan(y[key])).all(), (name, key)
                assert np.nanmax(np.abs(x[key].astype(np.float64) - y[key])) < 1e-4, (name, key)
        else:
            assert open(a, "rb").read() == open(b, "rb").read(), f"{b} differs"


def main(families, make, model_class, long_texts, quantise=None):
    """make(config, generator) gives the weights, model_class(config, weights) the reference; quantise(name, config,
    weights) the tensors of the checkpoint and the weights that they stand for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=families)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heed_moe_layer_freq()
    for name in [options.only] if options.only else families:
        committed = os.path.join(HERE, name)
        family = (families[name], make, model_class, name in long_texts, quantise)
        if not options.check:
            make_family(name, committed, *family)
            continue
        with tempfile.TemporaryDirectory() as fresh:
            make_family(name, fresh, *family)
            same(fresh, committed)


if __name__ == "__main__":
    main(FAMILIES, make_weights, Model, set(FAMILIES) - {"deepseek_v3_plain"})
