#!/usr/bin/env python3
"""Makes the golden checkpoints whose weights are quantised, as make_goldens.py makes the others (its options, its
checks, its files). Random weights are quantised by the rules below, written with their scales as released checkpoints
are, and dequantised again: those are what transformers and the reference compute with, in float32 and float64.

* fp8: a block of 128 outputs × 128 inputs (ragged at the edges) shares scale = largest size / 448; codes e4m3. With
  scale_fmt ue8m0 it is the next power of two, stored as its exponent.
* nvfp4: e2m1 codes of four bits, low half of a byte first; 16 inputs share an e4m3 scale, the matrix a float32 one.
  modelopt multiplies by weight_scale_2, compressed-tensors divides by weight_global_scale.
"""

import torch

import make_goldens_grouped
from make_goldens import COMMON, main, make_weights
from make_goldens_grouped import PLAIN
from reference_grouped import GroupedModel
from reference_model import Model

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

FAMILIES = {
    # Ragged blocks both ways (144, 200, 136, 320 outputs or inputs), heads that blocks cut, three shards; one module is
    # left as it was.
    "glm_moe_dsa_fp8": dict(
        COMMON, model_type="glm_moe_dsa", architectures=["GlmMoeDsaForCausalLM"], vocab_size=160, hidden_size=144,
        intermediate_size=200, moe_intermediate_size=40, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, n_shared_experts=1, n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
        first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=136, kv_lora_rank=40, qk_nope_head_dim=24,
        qk_rope_head_dim=16, v_head_dim=20, index_n_heads=8, index_head_dim=32, index_topk=16, rms_norm_eps=1e-5,
        tie_word_embeddings=False, indexer_rope_interleave=True, indexer_types=["full", "full"],
        rope_parameters=dict(rope_theta=1000000.0, rope_type="default"),
        quantization_config=dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
                                 weight_block_size=[128, 128],
                                 modules_to_not_convert=["lm_head", "model.layers.1.self_attn.q_a_proj"]),
    ),
    # modelopt; experts; inputs of 80, 48 and 112; names with '*'.
    "qwen3_moe_nvfp4": dict(
        PLAIN, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=160, hidden_size=80,
        intermediate_size=112, moe_intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[1], rms_norm_eps=1e-6, attention_bias=False, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=3, rope_theta=1000000.0, rope_scaling=None,
        quantization_config=dict(quant_method="modelopt", quant_algo="NVFP4", producer=dict(name="modelopt"),
                                 ignore=["lm_head", "model.layers.*.mlp.gate", "model.layers.2.self_attn*"]),
    ),
    # compressed-tensors; biases; an expression of what is left out.
    "llama_nvfp4": dict(
        PLAIN, model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=160, hidden_size=96,
        intermediate_size=208, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-6,
        attention_bias=True, mlp_bias=False, tie_word_embeddings=False, rope_theta=10000.0,
        quantization_config=dict(
            quant_method="compressed-tensors", format="nvfp4-pack-quantized", quantization_status="compressed",
            ignore=["lm_head", "re:.*layers\\.1\\.self_attn\\.[qk]_proj"],
            config_groups=dict(group_0=dict(
                targets=["Linear"], format="nvfp4-pack-quantized",
                weights=dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
                             dynamic=False),
                input_activations=dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
                                       dynamic="local")))),
    ),
}
KEPT = {
    "glm_moe_dsa_fp8": lambda name: "layers.1.self_attn.q_a_proj" in name,
    "qwen3_moe_nvfp4": lambda name: "layers.2.self_attn" in name,
    "llama_nvfp4": lambda name: "layers.1.self_attn.q_proj" in name or "layers.1.self_attn.k_proj" in name,
}
NEVER = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj")


def fp8(name, w, out, powers):
    rows, columns = w.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    back = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scales[i, j] = w[at].abs().max() / 448
            if powers:
                scales[i, j] = torch.exp2(torch.ceil(torch.log2(scales[i, j])))
            codes[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
            back[at] = codes[at].float() * scales[i, j]
    out[name], out[name + "_scale_inv"] = codes, scales.to(torch.float8_e8m0fnu) if powers else scales
    return back


def nvfp4(name, w, out, compressed):
    rows, columns = w.shape
    whole = w.abs().max() / (448 * 6)
    groups = w.reshape(rows, columns // 16, 16)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    unit = (scales.float() * whole).clamp(min=1e-30)[..., None]
    nearest = ((groups / unit).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (groups < 0)).to(torch.uint8).reshape(rows, columns)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = E2M1[nearest] * torch.where(groups < 0, -1.0, 1.0) * scales.float()[..., None]
    base = name.removesuffix("weight")
    out[base + "weight_scale"] = scales
    if compressed:
        out[base + "weight_packed"], out[base + "weight_global_scale"] = packed, (1 / whole).reshape(1)
        out[base + "input_global_scale"] = torch.tensor([100.0])
        values = values / (1 / whole)
    else:
        out[name], out[base + "weight_scale_2"] = packed, whole
        out[base + "input_scale"] = torch.tensor(0.01)
        values = values * whole
    return values.reshape(rows, columns)


def quantise(model, c, weights):
    method, powers = c["quantization_config"]["quant_method"], c["quantization_config"].get("scale_fmt") == "ue8m0"
    stored, dequantised = {}, {}
    for name, value in weights.items():
        w = torch.tensor(value)
        if value.ndim != 2 or any(part in name for part in NEVER) or KEPT.get(model, str.isspace)(name):
            stored[name], dequantised[name] = w, value
        elif method == "fp8":
            dequantised[name] = fp8(name, w, stored, powers).numpy()
        else:
            dequantised[name] = nvfp4(name, w, stored, method == "compressed-tensors").numpy()
    return stored, dequantised


def is_mla(c):
    return c["model_type"] == "glm_moe_dsa"


if __name__ == "__main__":
    main(FAMILIES, lambda c, rng: (make_weights if is_mla(c) else make_goldens_grouped.make_weights)(c, rng),
         lambda c, w: (Model if is_mla(c) else GroupedModel)(c, w), (), quantise)
