"""What a cache does to the values it keeps, in numpy float64: the rounding of every cache form, by definition.

A form also notes how near each E4M3 rounding was to going the other way (`nearest`, by row, as a share of the largest
value beside it), so that a text can be chosen on which float32 noise decides nothing.
"""

import numpy as np


def bf16(x):
    mantissa, exponent = np.frexp(x)  # 8 significant bits, ties to even
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def e4m3(x):
    """(rounded, distance to the nearest tie). Both relative to the largest of the last axis: steps below 2e-4 are of
    no account, for a bf16 query is coarser; ties between them count as far."""
    step = np.exp2(np.maximum(np.frexp(x)[1] - 1, -6) - 3.0)
    steps = np.abs(x) / step
    relative = step / np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30)
    distance = np.where(relative < 2e-4, 1.0, np.abs(steps - np.floor(steps) - 0.5) * relative)
    return np.copysign(np.minimum(np.rint(steps) * step, 448.0), x), distance


def scaled(x, power_of_two):
    """Groups of 128 along the last axis, each with its own scale; the last may be short."""
    out, distance = np.empty_like(x), np.empty_like(x)
    for begin in range(0, x.shape[-1], 128):
        group = x[..., begin : begin + 128]
        scale = np.maximum(np.abs(group).max(-1, keepdims=True), 1e-4) / 448.0
        if power_of_two:
            mantissa, exponent = np.frexp(scale)
            scale = np.exp2(exponent - (mantissa == 0.5))
        rounded, distance[..., begin : begin + 128] = e4m3(group / scale)
        out[..., begin : begin + 128] = rounded * scale
    return out, distance


def hadamard(x):
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return x @ matrix.T / np.sqrt(len(matrix))


class Exact:
    """Nothing is rounded."""

    def latent(self, c, k_rope):
        return c, k_rope

    def keys_and_values(self, k, v):
        return k, v

    def query(self, q):
        return q

    def index(self, q, k):
        return q, k

    def softmax(self, score):
        weight = np.exp(score - score.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True)


class Fp8(Exact):
    """fp8 or fp8_ds_mla, with FP8 index keys; queries are bf16, index queries FP8."""

    def __init__(self, ds_mla, with_hadamard=False, float_scales=False):
        self.ds_mla, self.with_hadamard, self.float_scales = ds_mla, with_hadamard, float_scales
        self.nearest = None

    def note(self, rounded, distance):
        by_row = distance.reshape(len(distance), -1).min(-1)
        self.nearest = by_row if self.nearest is None else np.minimum(self.nearest, by_row)
        return rounded

    def latent(self, c, k_rope):
        if self.ds_mla:
            return self.note(*scaled(c, True)), bf16(k_rope)
        return self.note(*e4m3(c)), self.note(*e4m3(k_rope))

    def keys_and_values(self, k, v):
        return self.note(*scaled(k, True)), self.note(*scaled(v, True))

    def query(self, q):
        return bf16(q)

    def softmax(self, score):
        """Weights are rounded too; whole powers of two in common change nothing."""
        t = score * np.log2(np.e)
        weight = bf16(np.exp2(t - np.rint(t.max(-1, keepdims=True))))
        return weight / weight.sum(-1, keepdims=True)

    def index(self, q, k):
        if self.with_hadamard:
            q, k = hadamard(q), hadamard(k)
        return tuple(self.note(*scaled(x, not self.float_scales)) for x in (q, k))
