"""How large can a component's rate of change be at most, given its weights and the region its inputs come from?

In: a model, sigma (the smallest standard deviation of a token over its channels) and r (the largest token norm).
Out: for every block and component an upper bound of the plasticity, and the spectral norm of its matrix.

    LayerNorm  max|gamma| / sqrt(sigma^2 + eps)                 tokens whose standard deviation is at least sigma
    Linear     ||W||_2                                          everywhere; attained along the top singular vector
    MHA        sum_h ||O_h||_2 ||V_h||_2 sqrt(3 n + (12 n + 3) r^4 ||A_h||_2^2)        n tokens in the ball of radius r
               A_h = Wq_h Wk_h^T / sqrt(d_h)

(arXiv 2602.06883.) The attention bound there assumes no query bias. With one, attention is that of the tokens [x, 1]:
A_h gets the row b_q Wk_h^T / sqrt(d_h) and r^2 becomes r^2 + 1; without this the bound was seen broken 39-fold. The
biases of k and v cancel. FC1 of a gated MLP is its up projection. No bound is known for attention with rotary
positions, a causal mask or normalised queries and keys: it is None, never a guess. NumPy in float64.
"""

import math
from collections.abc import Mapping

import numpy as np

COMPONENTS = ("ln1", "mha", "ln2", "fc1", "fc2")
REFERENCE_RADIUS = 19.4  # the paper's code; a mean of token norms rather than the radius of a ball


def spectral_norm(*factors: np.ndarray) -> float:
    """Largest singular value of the product `factors[0] @ factors[1]^T`, or of one matrix; exact, in float64.

    Only small matrices are decomposed: of one matrix the smaller Gram matrix (its largest eigenvalue is accurate to
    rounding), of a product [d, k] [e, k]^T the [k, k] product of the two triangular QR factors.
    """
    if len(factors) == 1:
        matrix = np.asarray(factors[0], np.float64)
        gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        return float(np.sqrt(np.linalg.eigvalsh(gram)[-1].clip(0)))
    left, right = (np.linalg.qr(np.asarray(f, np.float64), mode="r") for f in factors)
    return float(np.linalg.norm(left @ right.T, 2))


def split_heads(attention: Mapping, heads: int) -> list[dict[str, np.ndarray]]:
    """The matrices of each head: query, key, value [d, k] with query_bias [k] (None without one), and out [k, d].

    The fused kernel [d, 3 d] has the columns q | k | v, each head-major; heads are slices of the *output* axis of q, k
    and v, and of the *input* axis of the output projection [d, d].
    """
    kernel = np.asarray(attention["qkv"]["kernel"], np.float64)
    bias = attention["qkv"].get("bias")
    out = np.asarray(attention["out"]["kernel"], np.float64)
    query, key, value = np.split(kernel, 3, axis=1)
    query_bias = None if bias is None else np.split(np.asarray(bias, np.float64), 3)[0]
    width = query.shape[1] // heads
    slices = [slice(h * width, (h + 1) * width) for h in range(heads)]
    return [
        {
            "query": query[:, s],
            "key": key[:, s],
            "value": value[:, s],
            "query_bias": None if query_bias is None else query_bias[s],
            "out": out[s],
        }
        for s in slices
    ]


def layer_norm_bound(scale: np.ndarray, eps: float, sigma: float | None) -> float | None:
    """max|gamma| / sqrt(sigma^2 + eps): LayerNorm's Lipschitz constant where token standard deviations are >= sigma."""
    if sigma is None:
        return None
    spread = math.sqrt(float(sigma) ** 2 + eps)
    return float(np.abs(np.asarray(scale, np.float64)).max()) / spread if spread > 0 else None


def attention_bound(attention: Mapping, heads: int, tokens: int, radius: float | None) -> float | None:
    """The bound of multi-head attention with its output projection on `tokens` tokens in the ball of `radius`."""
    if radius is None:
        return None
    total = 0.0
    for head in split_heads(attention, heads):
        query, square = head["query"], float(radius) ** 2
        if head["query_bias"] is not None and np.any(head["query_bias"]):
            query, square = np.vstack([query, head["query_bias"]]), square + 1
        scores = spectral_norm(query, head["key"]) / math.sqrt(query.shape[1])
        growth = math.sqrt(3 * tokens + (12 * tokens + 3) * (square * scores) ** 2)
        total += spectral_norm(head["out"]) * spectral_norm(head["value"]) * growth
    return total


def why_unbounded(attention) -> str | None:
    """Why no bound of this attention module is known, or None where it is."""
    kinds = {
        "rope": "rotary positions",
        "causal": "a causal mask",
        "q_norm": "normalised queries and keys",
        "k_norm": "normalised queries and keys",
    }
    found = [words for name, words in kinds.items() if getattr(attention, name, None) not in (None, False)]
    return f"no bound is known for attention with {' and '.join(dict.fromkeys(found))}" if found else None


def bounds(model, *, sigma=None, radius=None, tokens: int | None = None, reference: bool = False) -> list[dict]:
    """Upper bounds of the plasticity of every block and component.

    Args:
      model: a ViT.
      sigma: smallest token standard deviation at the inputs of the layer norms: a number for all, or [blocks, 2] (LN1,
        LN2). None: their bounds are None.
      radius: largest token norm at the inputs of the attentions: a number, or [blocks]. None: their bounds are None.
      tokens: length n of the sequence; the model's own by default.
      reference: what the paper's code computes, for comparison, faults included: the signed maximum of gamma without
        1/sigma, heads sliced along the input axis, no query bias, r = 19.4 unless `radius` is given.
    Returns:
      [{block, component, bound, spectral_norm}] in block order; of a LayerNorm the spectral norm is max|gamma|, of an
      attention, which has no single matrix, None.
    """
    from vitplast_jax import models

    spec, params = model.spec, models.parameters(model)
    depth = len(params["blocks"])
    tokens = tokens or spec.tokens
    if reference and radius is None:
        radius = REFERENCE_RADIUS
    sigmas = None if sigma is None else np.broadcast_to(np.asarray(sigma, np.float64), (depth, 2))
    radii = None if radius is None else np.broadcast_to(np.asarray(radius, np.float64), (depth,))
    rows = []
    for index in range(depth):
        block = params["blocks"][index]
        r = None if radii is None else float(radii[index])
        for component in COMPONENTS:
            norm = None
            if component in ("ln1", "ln2"):
                scale = np.asarray(block["norm1" if component == "ln1" else "norm2"]["scale"], np.float64)
                norm = float(np.abs(scale).max())
                if reference:
                    bound = float(scale.max())
                else:
                    sigma_here = None if sigmas is None else float(sigmas[index, int(component == "ln2")])
                    bound = layer_norm_bound(scale, spec.eps, sigma_here)
            elif component == "mha" and why_unbounded(model.blocks[index].attn):
                bound = None
            elif component == "mha":
                make = _reference_attention_bound if reference else attention_bound
                bound = make(block["attn"], spec.heads, tokens, r)
            else:
                bound = norm = spectral_norm(block["mlp"][component]["kernel"])
            rows.append({"block": index, "component": component, "bound": bound, "spectral_norm": norm})
    return rows


def _reference_attention_bound(attention: Mapping, heads: int, tokens: int, radius: float) -> float:
    """As the paper's code: rows of our [in, out] kernels where columns are meant, and no query bias."""
    query, key, value = np.split(np.asarray(attention["qkv"]["kernel"], np.float64), 3, axis=1)
    out = np.asarray(attention["out"]["kernel"], np.float64)
    width = query.shape[0] // heads
    total = 0.0
    for s in (slice(h * width, (h + 1) * width) for h in range(heads)):
        scores = spectral_norm(query[s].T, key[s].T) / math.sqrt(width)
        growth = math.sqrt(3 * tokens + (12 * tokens + 3) * radius**4 * scores**2)
        total += spectral_norm(out[s]) * spectral_norm(value[s]) * growth
    return total
