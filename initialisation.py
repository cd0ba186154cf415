"""The initial values of the parameters.

**Idea** (Glorot and Bengio 2010; the factor of 2L: Radford et al. 2019, GPT-2). A sum of n products has n times the
variance of one. So weights of variance 1/n, with n the fan-in, leave the scale of the activations as it is. Each of the
2L matrices that add to the residual stream has 2L times less variance, since their results are summed. The embedding is
a look-up of fan-in 1, or of D if it is also the unembedding or multiplied by sqrt(D). Per-layer embeddings, which are
multiplied by sqrt(P), have a fan-in of P.

**Layout.** Under jit, with the shardings of the parameters as output, each device draws its own shards only. The values
depend on the seed and on the parameter's name and shape, with its padding, not on the mesh.
"""

import math
import zlib

import jax
import jax.numpy as jnp
from jax import lax

import anatomy
from config import Config
from parameters import Params, tree


def initial(name: str, shape: tuple[int, ...], weight: anatomy.Weight, config: Config) -> tuple[float, float]:
    """Mean and standard deviation of a weight's initial values."""
    if weight.start in (anatomy.ONES, anatomy.ZEROS):
        return float(weight.start == anatomy.ONES), 0.0
    start = "D" if name == "embed" and (config.tied_embeddings or config.embedding_scale) else weight.start
    model = anatomy.sizes(anatomy.config_of(config, name), padded=False)
    size = model | dict(zip(weight.dims, shape, strict=True))
    size |= {dim: model[dim] for dim in anatomy.PADDED_DIMS} | {"L": 2 * config.num_layers}
    return 0.0, math.prod(size[dim] for dim in start) ** -0.5


def without_padding(values: jax.Array, name: str, weight: anatomy.Weight, config: Config) -> jax.Array:
    """The values of a weight, with zeros in what `config.dim_multiple` adds. Gradients there are zero: it stays so."""
    kind = anatomy.config_of(config, name)
    stored, model = anatomy.sizes(kind), anatomy.sizes(kind, padded=False)
    for axis, dim in enumerate(weight.dims.replace("Z", "D")):  # Z is D of each expert
        if stored[dim] != model[dim]:
            places = lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(places % stored[dim] < model[dim], values, 0)
    return values


def init_params(config: Config, key: jax.Array) -> Params:
    """Draws the weights from normal distributions; norms start as ones, biases and padding as zeros.

    Call it under jit with the parameters' shardings as output.
    """

    def draw(name, shape, weight):
        mean, deviation = initial(name, shape, weight, config)
        normal = lambda: jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, jnp.float32)
        values = normal() * deviation if deviation else jnp.full(shape, mean, jnp.float32)
        return without_padding(values, name, weight, config)

    return tree(config, draw)
