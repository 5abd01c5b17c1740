#!/usr/bin/env python3
"""Makes the golden checkpoints with draft layers, and the logits of these. transformers has no forward for them, so
they are composed here from one of its decoder layers, and again from the float64 reference.

    /tmp/goldens/bin/python make_goldens_draft.py [--only NAME] [--check]

For position t with hidden h_t (after model.norm) and next token y_{t+1}:

    u_t = eh_proj [ RMSNorm(E[y_{t+1}]; enorm) ‖ RMSNorm(h_t; hnorm) ]  →  decoder layer  →  shared_head.norm  →  head

Row t predicts y_{t+2}. A second draft layer reads what came out of the first one's shared_head.norm at t, and y_{t+2},
which at the last position is the first one's guess. A further guess runs the last layer once more at t + 1, on the guess
before it and on what came out of shared_head.norm. A row whose choices or whose guess are too close to call is NaN: with
one layer, it spoils no other row.
"""

import argparse
import os
import tempfile

import numpy as np
import torch
from safetensors.numpy import save_file

import make_goldens
import make_goldens_grouped
import make_goldens_quantised
from make_goldens import (CHOICE_GAP, GREEDY, GREEDY_GAP, SHORT, continue_greedily, greedy_gaps, load_transformers,
                          run_full, same, text_with_gaps)
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
    # A guess after the first reads the keys that the first one chose.
    "glm_moe_dsa_kept_draft": (MLA, dict(make_goldens.FAMILIES["glm_moe_dsa"], vocab_size=128, num_hidden_layers=2,
                                         indexer_types=["full", "shared"], index_share_for_mtp_iteration=True)),
    # Two draft layers, quantised with eh_proj and all, their scales powers of two; most guesses hold.
    "deepseek_v3_sure_drafts": (MLA, dict(
        make_goldens.FAMILIES["deepseek_v3"], vocab_size=128, num_hidden_layers=2, num_nextn_predict_layers=2,
        quantization_config=dict(quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", activation_scheme="dynamic",
                                 weight_block_size=[128, 128]))),
    "glm4_moe_draft": (GROUPED, dict(make_goldens_grouped.FAMILIES["glm4_moe"], num_hidden_layers=2)),
}


def with_layers(c, count, first_dense):
    """The configuration with another number of layers; those added have experts and an indexer."""
    out = dict(c, num_hidden_layers=count, first_k_dense_replace=first_dense)
    if "indexer_types" in c:
        out["indexer_types"] = (c["indexer_types"] + ["full"] * count)[:count] if first_dense else ["full"] * count
    return out


def draft_as_model(c, weights, number):
    """A draft layer as a model of one layer, whose input comes ready-made."""
    prefix = f"model.layers.{c['num_hidden_layers'] + number}."
    one = {"model.layers.0." + k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    one = {k: v for k, v in one.items() if not any(
        part in k for part in ("enorm", "hnorm", "eh_proj", "shared_head", ".0.embed_tokens"))}
    one["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    one["model.norm.weight"] = weights[prefix + "shared_head.norm.weight"]
    one["lm_head.weight"] = weights["lm_head.weight"]
    return with_layers(c, 1, 0), one


class DraftLayer:
    """`run(u, kept)` gives (logits, normed hidden, smallest gap of a choice) of every row of u, where rows after `kept`
    read the keys that it chose (None: they choose); `h` are the rows of the layer before, or of the main model after its
    norm."""

    def __init__(self, c, weights, number, run):
        p = f"model.layers.{c['num_hidden_layers'] + number}."
        self.embed, self.run, self.eps = np.float64(weights["model.embed_tokens.weight"]), run, c["rms_norm_eps"]
        self.keeps = c["index_topk"] if c.get("index_share_for_mtp_iteration") else None
        self.enorm, self.hnorm, self.eh = (
            np.float64(weights[p + name + ".weight"]) for name in ("enorm", "hnorm", "eh_proj"))

    def inputs(self, next_tokens, h):
        both = [rms_norm(self.embed[next_tokens], self.enorm, self.eps), rms_norm(h, self.hnorm, self.eps)]
        return np.concatenate(both, -1) @ self.eh.T

    def guesses(self, u, t, first, count):
        """Logits of the guesses in a row that follow position t, the first of which is known; and what is clear."""
        rows, (logits, hidden, gap) = u[: t + 1], (part[t] for part in first)
        kept = t if self.keeps is not None and t + 1 > self.keeps else None
        out, clear = [logits], [gap > CHOICE_GAP]
        while len(out) < count:
            clear.append(clear[-1] and greedy_gaps(logits[None])[0] > GREEDY_GAP)
            rows = np.concatenate([rows, self.inputs(np.array([logits.argmax()]), hidden[None])])
            logits, hidden, gap = (part[-1] for part in self.run(rows, kept))
            clear[-1] = clear[-1] and gap > CHOICE_GAP
            out.append(logits)
        return np.stack(out), np.array(clear)


def decode(layers, whole, h):
    """What several layers guess where an answer to the first SHORT tokens decodes with GUESSES drafts a step: NaN where
    no step leads. Rows that read a guess stay as they are when it does not hold."""
    vocabulary = len(layers[0].embed)
    out = np.full((GREEDY, GUESSES, vocabulary), np.nan)
    inputs = [np.zeros((0, h.shape[1])) for _ in layers]  # of the rows of earlier steps
    drafts, start, answered, held = [], 0, 0, 0
    while answered < GREEDY:
        if start == 0:
            lead, wanted = SHORT - 1, 1
        else:
            useful = drafts[: GREEDY - answered - 1]
            right = [bool(d == whole[start + 1 + i]) for i, d in enumerate(useful)]
            lead = start + (right.index(False) if False in right else len(right))
            room = SHORT + GREEDY - 1 - start - len(useful)  # of rows that guesses after the first write
            wanted = max(0, min(GUESSES, GREEDY - answered - 2, room))
        held += lead - start if start else 0
        known, hidden, guesses = list(whole[1 : lead + 2]), h[: lead + 1], []
        for k, layer in enumerate(layers):
            tokens = [known[min(i + k, len(known) - 1)] for i in range(start, lead + 1)]
            inputs[k] = np.concatenate([inputs[k], layer.inputs(np.array(tokens), hidden[start:])])
            rows = layer.run(inputs[k], None)
            hidden = rows[1]
            if len(guesses) < wanted:
                assert rows[2][lead] > CHOICE_GAP and greedy_gaps(rows[0][lead][None])[0] > GREEDY_GAP
                guesses.append(rows[0][lead])
                known.append(rows[0][lead].argmax())
        if wanted > len(layers):
            more, clear = layers[-1].guesses(inputs[-1], lead, rows, wanted - len(layers) + 1)
            assert clear.all() and greedy_gaps(more).min() > GREEDY_GAP
            guesses += list(more[1:])
        for r, logits in enumerate(guesses):
            out[lead - SHORT + 1, r] = logits
        drafts = [logits.argmax() for logits in guesses]
        answered += lead - start + 1 if start else 1
        start = lead + 1
    return out, held


def reference(model_class, c, weights, number):
    one = model_class(*draft_as_model(c, weights, number))

    def run(u, kept=None):
        trace = one.forward(np.zeros(len(u), int), u, kept)
        return trace.logits, rms_norm(trace.hidden[-1], one.w["model.norm.weight"], one.eps), trace.margins

    return DraftLayer(c, weights, number, run)


def composed(c, weights, number):
    """The same of a decoder layer of transformers."""
    hf = load_transformers(*draft_as_model(c, weights, number))
    at = {}
    hf.model.norm.register_forward_hook(lambda m, args, out: at.__setitem__("normed", out[0].numpy()))

    def choose(m, args, out):
        if at["kept"] is None:
            return out
        out = out.clone()
        out[0, at["kept"] + 1 :] = out[0, at["kept"]]
        return out

    if getattr(hf.model.layers[0].self_attn, "indexer", None) is not None:
        hf.model.layers[0].self_attn.indexer.register_forward_hook(choose)

    @torch.no_grad()
    def run(u, kept=None):
        at["kept"] = kept
        logits = hf(inputs_embeds=torch.tensor(u[None], dtype=torch.float32), use_cache=False).logits[0].numpy()
        return logits, at["normed"], np.ones(len(u))

    return DraftLayer(c, weights, number, run)


def make_weights(name, make, c, rng):
    layers, d = c["num_hidden_layers"], c["hidden_size"]
    weights = make(with_layers(c, layers, c["first_k_dense_replace"]), rng)
    draft = make(with_layers(c, layers + c["num_nextn_predict_layers"], c["first_k_dense_replace"]), rng)
    for p in (f"model.layers.{layers + i}." for i in range(c["num_nextn_predict_layers"])):
        weights.update({k: v for k, v in draft.items() if k.startswith(p)})
        for part in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{p}{part}.weight"] = rng.uniform(0.8, 1.2, d).astype(np.float32)
        weights[p + "eh_proj.weight"] = (rng.standard_normal((d, 2 * d)) / np.sqrt(2 * d)).astype(np.float32)
        if "sure" in name:
            make_sure(weights, d, p)
        if name == "glm_moe_dsa_draft":
            weights[p + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
            weights[p + "shared_head.head.weight"] = weights["lm_head.weight"]
    if "sure" in name:
        hush(weights)
    return weights


def make_sure(weights, d, p):
    """The draft layer sees little beside the token's embedding."""
    weights[p + "enorm.weight"] = np.ones(d, np.float32)
    weights[p + "eh_proj.weight"] = np.concatenate([np.eye(d), 0.01 * weights[p + "eh_proj.weight"][:, d:]], 1).astype(np.float32)
    weights[p + "shared_head.norm.weight"] = weights["model.norm.weight"]


def hush(weights):
    """Attention and feed-forward hardly count beside the token's embedding."""
    for key in weights:
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            weights[key] = weights[key] * np.float32(0.02)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * np.float32(120)


def guesses_of(layers, whole, h):
    """Logits of the first draft layer at every position; of the guesses in a row where steps lead, NaN elsewhere."""
    u = layers[0].inputs(whole[1:], h[:-1])
    rows = layers[0].run(u)
    if len(layers) > 1:
        again, held = decode(layers, whole, h)
        leads = np.isfinite(again[:, 0, 0])
        again[leads, 0] = rows[0][SHORT - 1 :][leads]  # the same, of more rows at once
        print(f"  {held} of {GREEDY} tokens were drafts that held")
        return rows, again, np.isfinite(again[..., 0])
    again, clear = (np.stack(part) for part in zip(
        *(layers[0].guesses(u, t, rows, GUESSES) for t in range(SHORT - 1, len(whole) - 1))))
    return rows, again, clear


def make_family(name, folder):
    (maker, model_class), c = FAMILIES[name]
    c = dict(c, num_nextn_predict_layers=max(1, c["num_nextn_predict_layers"]))
    count = c["num_nextn_predict_layers"]
    rng = np.random.default_rng(sum(map(ord, name)))
    weights = make_weights(name, maker.make_weights, c, rng)
    stored = weights
    if "quantization_config" in c:
        stored, weights = make_goldens_quantised.quantise(name, c, weights)
    model = model_class(c, weights)
    short, continuation = continue_greedily(model, text_with_gaps(model, SHORT, rng), rng)
    whole = np.concatenate([short, continuation])
    h = rms_norm(model.forward(whole).hidden[-1], model.w["model.norm.weight"], model.eps)
    rows, again, clear_again = guesses_of([reference(model_class, c, weights, i) for i in range(count)], whole, h)
    clear = rows[2] > CHOICE_GAP
    assert clear.mean() > 0.8 and (count > 1 or clear_again.mean() > 0.7), (clear.mean(), clear_again.mean())

    make_goldens.write_checkpoint(folder, c, stored)
    hf = load_transformers(c, weights)
    main_logits, hooks = run_full(hf, whole)
    assert np.abs(main_logits - model.forward(whole).logits).max() < 1e-4
    hf_h = rms_norm(np.float64(hooks.hidden[c["num_hidden_layers"]]), model.w["model.norm.weight"], model.eps)
    hf_rows, hf_again, _ = guesses_of([composed(c, weights, i) for i in range(count)], whole, hf_h)
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
