#!/usr/bin/env python3
"""Turns a GGUF file of the llama architecture into an ordinary model folder: config.json, model.safetensors with
dequantised weights, tokenizer.json, tokenizer_config.json, generation_config.json and prompt.txt.

    gguf_to_folder.py FILE FOLDER [--dtype f32|bf16]

Needs the PyPI package gguf. The folder appears whole or not at all: it is made beside its place and renamed.
bf16 is rounded to nearest, ties to even, from the dequantised float32.
"""

import argparse
import json
import os
import shutil
import struct
import sys

import numpy as np
from gguf import GGUFReader, dequantize

LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL, USER_DEFINED = 3, 4  # token types
PROMPT = "Why is the sky blue? Answer in three sentences."


class Refused(Exception):
    pass


class Metadata:
    def __init__(self, reader):
        self.fields = reader.fields

    def get(self, name, otherwise=None):
        return self.fields[name].contents() if name in self.fields else otherwise

    def need(self, name):
        if name not in self.fields:
            raise Refused(f"the file has no {name}")
        return self.fields[name].contents()


def float32_number(value):
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def config_of(meta, tied, dtype):
    architecture = meta.need("general.architecture")
    if architecture != "llama":
        raise Refused(f"its architecture is {architecture}; only llama is converted")
    if meta.get("llama.rope.scaling.type", "none") != "none" or meta.get("llama.expert_count", 0):
        raise Refused("rope scaling and experts are not converted")
    heads, width = meta.need("llama.attention.head_count"), meta.need("llama.embedding_length")
    head = meta.get("llama.attention.key_length", width // heads)
    if meta.get("llama.rope.dimension_count", head) != head:
        raise Refused("heads that turn in part are not converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": meta.need("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "head_dim": head,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": meta.need("llama.feed_forward_length"),
        "max_position_embeddings": meta.need("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta.need("llama.block_count"),
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": float32_number(meta.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": float32_number(meta.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype],
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    }


def half_split(weight, heads):
    """Rows of q and k back in the order in which dimension j turns with j + half: in GGUF it turns with its
    neighbour."""
    rows = weight.reshape(heads, -1, 2, weight.shape[-1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def name_of(tensor):
    """What kind of tensor it is, and its name in a model folder."""
    parts = tensor.name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[3] == "weight" and parts[2] in LAYER_NAMES:
        return parts[2], f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    if len(parts) == 2 and parts[1] == "weight" and parts[0] in OUTER_NAMES:
        return parts[0], OUTER_NAMES[parts[0]] + ".weight"
    raise Refused(f"tensor {tensor.name} is unknown")


def values_of(tensor, config):
    kind, _ = name_of(tensor)
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    turned = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return half_split(values, turned[kind]) if kind in turned else values


def stored(values, dtype):
    if dtype == "f32":
        return np.ascontiguousarray(values, "<f4").tobytes()
    bits = np.ascontiguousarray(values, "<f4").view(np.uint32)
    if not np.isfinite(values).all():
        raise Refused("a weight is not finite")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path, reader, config, dtype):
    """The header comes first, from shapes alone, so that one tensor at a time is in memory."""
    kind, size = {"f32": ("F32", 4), "bf16": ("BF16", 2)}[dtype]
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        end = at + size * int(np.prod(shape))
        header[name_of(tensor)[1]] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for done, tensor in enumerate(reader.tensors, 1):
            file.write(stored(values_of(tensor, config), dtype))
            if sys.stderr.isatty():
                print(f"\r    {done} of {len(reader.tensors)} tensors", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if file.tell() != 8 + len(text) + at:
            raise Refused("a tensor has another size than its shape says")


def tokenizer_of(meta):
    if meta.need("tokenizer.ggml.model") != "gpt2" or meta.need("tokenizer.ggml.pre") != "smollm":
        raise Refused("only SmolLM's kind of tokenizer (gpt2, smollm) is converted")
    tokens, types = meta.need("tokenizer.ggml.tokens"), meta.need("tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": kind != CONTROL, "special": kind == CONTROL}
            for i, (content, kind) in enumerate(zip(tokens, types)) if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": meta.need("tokenizer.ggml.merges"),
        },
    }


def tokenizer_config_of(meta, config):
    tokens = meta.need("tokenizer.ggml.tokens")

    def named(field):
        return tokens[meta.need(field)] if meta.get(field) is not None else None

    return {
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "bos_token": named("tokenizer.ggml.bos_token_id"),
        "chat_template": meta.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": named("tokenizer.ggml.eos_token_id"),
        "model_max_length": config["max_position_embeddings"],
        "pad_token": named("tokenizer.ggml.padding_token_id"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": named("tokenizer.ggml.unknown_token_id"),
    }


def write_json(folder, name, value, **how):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, **how)
        file.write("\n")


def convert(gguf_file, folder, dtype):
    reader = GGUFReader(gguf_file)
    meta = Metadata(reader)
    config = config_of(meta, "output.weight" not in {tensor.name for tensor in reader.tensors}, dtype)
    parent, name = os.path.split(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    making = os.path.join(parent, f".{name}.{os.getpid()}")
    os.mkdir(making)
    try:
        write_safetensors(os.path.join(making, "model.safetensors"), reader, config, dtype)
        write_json(making, "tokenizer.json", tokenizer_of(meta))
        write_json(making, "tokenizer_config.json", tokenizer_config_of(meta, config), indent=2)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(making, "generation_config.json", ids, indent=2)
        with open(os.path.join(making, "prompt.txt"), "w", encoding="utf-8") as file:
            file.write(f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{PROMPT}<|im_end|>\n"
                       "<|im_start|>assistant\n")
        write_json(making, "config.json", config, indent=2)
        if os.path.isdir(folder):
            os.rmdir(folder)  # empty, or this fails
        os.rename(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file")
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    options = parser.parse_args()
    try:
        convert(options.file, options.folder, options.dtype)
    except (Refused, OSError, ValueError) as problem:
        sys.exit(f"gguf_to_folder: {options.file}: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
