#!/usr/bin/env python3
"""Makes the golden checkpoints with a draft layer, and the logits of that layer. transformers has no forward for it,
so it is composed here from one of its decoder layers, and again from the float64 reference.

    /tmp/goldens/bin/python make_goldens_draft.py [--only NAME] [--check]

For position t with hidden h_t (after model.norm) and next token y_{t+1}:

    u_t = eh_proj [ RMSNorm(E[y_{t+1}]; enorm) ‖ RMSNorm(h_t; hnorm) ]  →  decoder layer  →  shared_head.norm  →  head

Row t predicts y_{t+2}. A second guess runs the layer once more at t + 1, on the first guess and on what came out of
shared_head.norm; a third likewise. A row whose choices or whose guess are too close to call is NaN: with one layer,
it spoils no other row.
"""

import argparse
import os
import tempfile

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

import make_goldens
import make_goldens_grouped
from make_goldens import CHOICE_GAP, GREEDY_GAP, SHORT, continue_greedily, greedy_gaps, run_full, same, text_with_gaps
from reference_grouped import GroupedModel
from reference_model import Model, rms_norm

HERE = os.path.dirname(os.path.abspath(__file__))
GUESSES = 3  # in a row

MLA, GROUPED = (make_goldens, Model), (make_goldens_grouped, GroupedModel)
FAMILIES = {
    # The draft layer brings no embedding and no head of its own.
    "deepseek_v3_draft": (MLA, dict(make_goldens.FAMILIES["deepseek_v3"], vocab_size=300, num_hidden_layers=2)),
    # It owns an indexer, and brings copies of embedding and head.
    "glm_moe_dsa_draft": (MLA, dict(make_goldens.FAMILIES["glm_moe_dsa"], vocab_size=256, num_hidden_layers=3,
                                    indexer_types=["full", "shared", "full"])),
    # Made so that most guesses hold: a token follows from the one before it, in the model as in the draft layer.
    "glm_moe_dsa_sure_draft": (MLA, dict(make_goldens.FAMILIES["glm_moe_dsa"], vocab_size=128, num_hidden_layers=2,
                                         indexer_types=["full", "shared"])),
    "glm4_moe_draft": (GROUPED, dict(make_goldens_grouped.FAMILIES["glm4_moe"], num_hidden_layers=2)),
}


def with_layers(c, count, first_dense):
    """The configuration with another number of layers; those added have experts and an indexer."""
    out = dict(c, num_hidden_layers=count, first_k_dense_replace=first_dense)
    if "indexer_types" in c:
        out["indexer_types"] = (c["indexer_types"] + ["full"] * count)[:count] if first_dense else ["full"] * count
    return out


def draft_as_model(c, weights):
    """The draft layer as a model of one layer, whose input comes ready-made."""
    prefix = f"model.layers.{c['num_hidden_layers']}."
    one = {"model.layers.0." + k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    one = {k: v for k, v in one.items() if not any(
        part in k for part in ("enorm", "hnorm", "eh_proj", "shared_head", ".0.embed_tokens"))}
    one["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    one["model.norm.weight"] = weights[prefix + "shared_head.norm.weight"]
    one["lm_head.weight"] = weights["lm_head.weight"]
    return with_layers(c, 1, 0), one


class DraftLayer:
    """`run(u)` gives (logits, normed hidden, smallest gap of a choice) of every row of u; `h` are the rows of the main
    model after its norm."""

    def __init__(self, c, weights, run):
        p = f"model.layers.{c['num_hidden_layers']}."
        self.embed, self.run, self.eps = np.float64(weights["model.embed_tokens.weight"]), run, c["rms_norm_eps"]
        self.enorm, self.hnorm, self.eh = (
            np.float64(weights[p + name + ".weight"]) for name in ("enorm", "hnorm", "eh_proj"))

    def inputs(self, next_tokens, h):
        both = [rms_norm(self.embed[next_tokens], self.enorm, self.eps), rms_norm(h, self.hnorm, self.eps)]
        return np.concatenate(both, -1) @ self.eh.T

    def guesses(self, u, t, first):
        """Logits of the guesses in a row that follow position t, the first of which is known; and what is clear."""
        rows, (logits, hidden, gap) = u[: t + 1], (part[t] for part in first)
        out, clear = [logits], [gap > CHOICE_GAP]
        while len(out) < GUESSES:
            clear.append(clear[-1] and greedy_gaps(logits[None])[0] > GREEDY_GAP)
            rows = np.concatenate([rows, self.inputs(np.array([logits.argmax()]), hidden[None])])
            logits, hidden, gap = (part[-1] for part in self.run(rows))
            clear[-1] = clear[-1] and gap > CHOICE_GAP
            out.append(logits)
        return np.stack(out), np.array(clear)


def reference(model_class, c, weights):
    one = model_class(*draft_as_model(c, weights))

    def run(u):
        trace = one.forward(np.zeros(len(u), int), u)
        return trace.logits, rms_norm(trace.hidden[-1], one.w["model.norm.weight"], one.eps), trace.margins

    return DraftLayer(c, weights, run)


def composed(write_checkpoint, c, weights):
    """The same of a decoder layer of transformers."""
    config, one = draft_as_model(c, weights)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config, one)
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    kept = {}
    hf.model.norm.register_forward_hook(lambda m, args, out: kept.__setitem__("normed", out[0].numpy()))

    @torch.no_grad()
    def run(u):
        logits = hf(inputs_embeds=torch.tensor(u[None], dtype=torch.float32), use_cache=False).logits[0].numpy()
        return logits, kept["normed"], np.ones(len(u))

    return DraftLayer(c, weights, run)


def make_weights(name, make, c, rng):
    layers = c["num_hidden_layers"]
    weights = make(with_layers(c, layers, c["first_k_dense_replace"]), rng)
    d, p = c["hidden_size"], f"model.layers.{layers}."
    draft = make(with_layers(c, layers + 1, c["first_k_dense_replace"]), rng)
    weights.update({k: v for k, v in draft.items() if k.startswith(p)})
    norm = lambda: rng.uniform(0.8, 1.2, d).astype(np.float32)
    weights[p + "enorm.weight"], weights[p + "hnorm.weight"], weights[p + "shared_head.norm.weight"] = norm(), norm(), norm()
    weights[p + "eh_proj.weight"] = (rng.standard_normal((d, 2 * d)) / np.sqrt(2 * d)).astype(np.float32)
    if "sure" in name:
        make_sure(weights, d, p)
    if name == "glm_moe_dsa_draft":
        weights[p + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        weights[p + "shared_head.head.weight"] = weights["lm_head.weight"]
    return weights


def make_sure(weights, d, p):
    """Attention and feed-forward hardly count beside the token's embedding, and the draft layer sees little else."""
    for key in weights:
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            weights[key] = weights[key] * np.float32(0.02)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * np.float32(120)
    weights[p + "enorm.weight"] = np.ones(d, np.float32)
    weights[p + "eh_proj.weight"] = np.concatenate([np.eye(d), 0.01 * weights[p + "eh_proj.weight"][:, d:]], 1).astype(np.float32)
    weights[p + "shared_head.norm.weight"] = weights["model.norm.weight"]


def make_family(name, folder):
    (maker, model_class), c = FAMILIES[name]
    c = dict(c, num_nextn_predict_layers=1)
    write_checkpoint = make_goldens.write_checkpoint
    rng = np.random.default_rng(sum(map(ord, name)))
    weights = make_weights(name, maker.make_weights, c, rng)
    model = model_class(c, weights)
    short, continuation = continue_greedily(model, text_with_gaps(model, SHORT, rng), rng)
    whole = np.concatenate([short, continuation])
    positions = range(SHORT - 1, len(whole) - 1)
    h = rms_norm(model.forward(whole).hidden[-1], model.w["model.norm.weight"], model.eps)
    exact = reference(model_class, c, weights)
    u = exact.inputs(whole[1:], h[:-1])
    rows = exact.run(u)
    again, clear_again = (np.stack(part) for part in zip(*(exact.guesses(u, t, rows) for t in positions)))
    clear = rows[2] > CHOICE_GAP
    assert clear.mean() > 0.8 and clear_again.mean() > 0.7, (clear.mean(), clear_again.mean())

    write_checkpoint(folder, c, weights)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    main_logits, hooks = run_full(hf, whole)
    assert np.abs(main_logits - model.forward(whole).logits).max() < 1e-4
    hf_h = rms_norm(np.float64(hooks.hidden[c["num_hidden_layers"]]), model.w["model.norm.weight"], model.eps)
    layer = composed(write_checkpoint, c, weights)
    hf_u = layer.inputs(whole[1:], hf_h[:-1])
    hf_rows = layer.run(hf_u)
    hf_again = np.stack([layer.guesses(hf_u, t, hf_rows)[0] for t in positions])
    hf_logits = np.where(clear[:, None], hf_rows[0], np.nan)
    hf_again = np.where(clear_again[..., None], hf_again, np.nan)
    difference = max(np.nanmax(np.abs(hf_logits - rows[0])), np.nanmax(np.abs(hf_again - again)))
    assert difference < 1e-4, (name, difference)
    print(f"{name}: reference − transformers, max abs {difference:.2e}; clear: {clear.mean():.0%} of rows, "
          f"{clear_again.mean():.0%} of guesses in a row; |logit| up to {np.abs(rows[0]).max():.1f}")
    save_file({"short.tokens": short.astype(np.int32), "greedy.tokens": continuation.astype(np.int32),
               "short.logits.full": main_logits[:SHORT], "draft.logits": np.float32(hf_logits),
               "draft.guesses": np.float32(hf_again)}, os.path.join(folder, "golden.safetensors"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [options.only] if options.only else FAMILIES:
        if not options.check:
            make_family(name, os.path.join(HERE, name))
            continue
        with tempfile.TemporaryDirectory() as fresh:
            make_family(name, fresh)
            same(fresh, os.path.join(HERE, name))


if __name__ == "__main__":
    main()
