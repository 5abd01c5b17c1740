#!/usr/bin/env python3
"""Makes the golden checkpoints of the grouped-query families, as make_goldens.py makes the others (its options, its
checks, its files)."""

import math

import numpy as np

from make_goldens import COMMON, main
from reference_grouped import GroupedModel

PLAIN = {k: v for k, v in COMMON.items() if k not in ("attention_bias", "num_nextn_predict_layers")}

FAMILIES = {
    # SmolLM2's heads (9 that read 3), tied, positions interpolated.
    "llama_smol": dict(
        PLAIN, model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=512, hidden_size=72,
        intermediate_size=200, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5,
        attention_bias=False, mlp_bias=False, tie_word_embeddings=True, rope_theta=10000.0,
        rope_scaling=dict(rope_type="linear", factor=4.0),
    ),
    # Heads wider than hidden / heads; llama3 in the newer spelling, and a text beyond the original context.
    "llama": dict(
        PLAIN, model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=200, hidden_size=64,
        intermediate_size=144, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        rms_norm_eps=1e-6, attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
        rope_parameters=dict(rope_theta=10000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    # Every bias; YaRN beyond the original context; 12 heads that read 4.
    "llama_bias": dict(
        PLAIN, model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=160, hidden_size=60,
        intermediate_size=136, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=4, head_dim=12,
        rms_norm_eps=1e-6, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, rope_theta=10000.0,
        rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=128),
    ),
    # Biases of q, k and v; Qwen2-0.5B's heads (14 that read 2).
    "qwen2": dict(
        PLAIN, model_type="qwen2", architectures=["Qwen2ForCausalLM"], vocab_size=192, hidden_size=112,
        intermediate_size=160, num_hidden_layers=2, num_attention_heads=14, num_key_value_heads=2, rms_norm_eps=1e-6,
        tie_word_embeddings=True, use_sliding_window=False, sliding_window=16, max_window_layers=1,
        rope_theta=1000000.0,
    ),
    # All layers but the first see the last 8 keys.
    "qwen2_window": dict(
        PLAIN, model_type="qwen2", architectures=["Qwen2ForCausalLM"], vocab_size=512, hidden_size=64,
        intermediate_size=144, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, rms_norm_eps=1e-6,
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, max_window_layers=1,
        rope_theta=10000.0,
    ),
    # Norms of q and k, heads wider than hidden / heads, YaRN whose factor is not max_position / original.
    "qwen3": dict(
        PLAIN, model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=192, hidden_size=48,
        intermediate_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        rms_norm_eps=1e-5, attention_bias=False, tie_word_embeddings=True, use_sliding_window=False,
        sliding_window=None, max_window_layers=3, rope_theta=1000000.0,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    # One layer without experts in the list; weights normalised.
    "qwen3_moe": dict(
        PLAIN, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=192, hidden_size=48,
        intermediate_size=112, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=4, head_dim=12, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[1], rms_norm_eps=1e-6, attention_bias=False, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=3, rope_theta=1000000.0, rope_scaling=None,
    ),
    # Every second layer has experts; weights not normalised; all biases; a KV head for every query head.
    "qwen3_moe_plain": dict(
        PLAIN, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=160, hidden_size=48,
        intermediate_size=112, moe_intermediate_size=20, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=6, head_dim=8, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False,
        decoder_sparse_step=2, mlp_only_layers=[], rms_norm_eps=1e-6, attention_bias=True, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=4, rope_theta=10000.0, rope_scaling=None,
    ),
    # Half of a head turns; norms of q and k, biases; expert groups; 12 heads that read 2.
    "glm4_moe": dict(
        PLAIN, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], vocab_size=192, hidden_size=48,
        intermediate_size=136, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=12,
        num_key_value_heads=2, head_dim=16, partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=True,
        n_shared_experts=1, n_routed_experts=12, num_experts_per_tok=3, n_group=3, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, first_k_dense_replace=1, num_nextn_predict_layers=0, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_theta=1000000.0, rope_scaling=None,
    ),
    # The same without norms of q and k and without biases, as GLM-4.5-Air; three quarters of a head turn.
    "glm4_moe_plain": dict(
        PLAIN, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], vocab_size=160, hidden_size=48,
        intermediate_size=136, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, attention_bias=False, use_qk_norm=False,
        n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=False,
        routed_scaling_factor=1.5, first_k_dense_replace=1, num_nextn_predict_layers=0, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_theta=10000.0, rope_type="default", partial_rotary_factor=0.75),
    ),
}
LONG_TEXTS = ("llama", "llama_bias", "qwen3", "glm4_moe")


def layer_has_experts(c, layer):
    if c["model_type"] == "glm4_moe":
        return layer >= c["first_k_dense_replace"]
    if c["model_type"] == "qwen3_moe":
        return layer not in c["mlp_only_layers"] and (layer + 1) % c["decoder_sparse_step"] == 0
    return False


def make_weights(c, rng):
    def vector(low, high, width):
        return rng.uniform(low, high, width).astype(np.float32)

    def linear(name, rows, columns, bias=False, gain=1.0):
        w[name + ".weight"] = (rng.standard_normal((rows, columns)) * gain * 1.5 / math.sqrt(columns)).astype(np.float32)
        if bias:
            w[name + ".bias"] = vector(-0.3, 0.3, rows)

    def mlp(prefix, width, bias=False):
        linear(prefix + "gate_proj", width, d, bias)
        linear(prefix + "up_proj", width, d, bias)
        linear(prefix + "down_proj", d, width, bias)

    kind, d, w = c["model_type"], c["hidden_size"], {}
    head = c.get("head_dim") or d // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    bias = kind == "qwen2" or c["attention_bias"]
    normed = kind in ("qwen3", "qwen3_moe") or c.get("use_qk_norm", False)
    # Small activations in front of a norm make its epsilon count.
    small = 0.01 if c["rms_norm_eps"] > 1e-6 else 1.0
    linear("model.embed_tokens", c["vocab_size"], d, gain=0.7 if c["tie_word_embeddings"] else 2.0 * small)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        w[p + "input_layernorm.weight"], w[p + "post_attention_layernorm.weight"] = (vector(0.8, 1.2, d) for _ in "ab")
        linear(a + "q_proj", q, d, bias, small if normed and not bias else 1.0)
        linear(a + "k_proj", kv, d, bias, small if normed and not bias else 1.0)
        linear(a + "v_proj", kv, d, bias)
        linear(a + "o_proj", d, q, bias and kind not in ("qwen2", "glm4_moe"))
        if normed:
            w[a + "q_norm.weight"], w[a + "k_norm.weight"] = vector(0.8, 1.6, head), vector(0.8, 1.6, head)
        if not layer_has_experts(c, layer):
            mlp(p + "mlp.", c["intermediate_size"], c.get("mlp_bias", False))
            continue
        experts = c.get("num_experts") or c["n_routed_experts"]
        linear(p + "mlp.gate", experts, d)
        if kind == "glm4_moe":
            w[p + "mlp.gate.e_score_correction_bias"] = vector(0.02, 0.22, experts)
            mlp(p + "mlp.shared_experts.", c["n_shared_experts"] * c["moe_intermediate_size"])
        for e in range(experts):
            mlp(f"{p}mlp.experts.{e}.", c["moe_intermediate_size"])
    w["model.norm.weight"] = vector(0.8, 1.2, d)
    if not c["tie_word_embeddings"]:
        linear("lm_head", c["vocab_size"], d, gain=0.7)
    return w


if __name__ == "__main__":
    main(FAMILIES, make_weights, GroupedModel, LONG_TEXTS)
