"""Evaluation: the mean cross-entropy of held-out sequences, with the training step's forward pass on its mesh."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import data
import fsdp
import model
import parameters
import placement
import sharding
from config import Config
from sharding import BATCH_SPEC, LOSS_AXES


def make_eval_step(config: Config, mesh: Mesh):
    """Returns jitted (params, batch, amax) -> (sum of the cross-entropies of all targets, number of targets)."""
    specs = parameters.param_specs(config)
    config = dataclasses.replace(config, z_loss=0.0, load_balance_loss=0.0, router_z_loss=0.0, mtp_loss=0.0)

    def per_device(params, batch, amax):
        weights = fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config), config.collectives)
        scaling = parameters.Scaling(lax.pcast(amax, placement.MESH_AXES, to="varying"))
        microbatches = config.microbatches if lax.axis_size("pipe") == 1 else 1  # a pipeline splits the batch itself
        loss_of = lambda _, microbatch: (None, model.loss_fn(weights, microbatch, config, scaling)[0])
        loss = jnp.sum(lax.scan(loss_of, None, model.split(batch, microbatches))[1])
        return lax.psum(loss, LOSS_AXES), lax.psum(jnp.sum(batch.loss_weights), sharding.axes_of(BATCH_SPEC))

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, BATCH_SPEC, P()), out_specs=(P(), P()))
    return jax.jit(lambda params, batch, amax=None: sharded(params, batch, amax or {}))


def evaluate(eval_step, params, corpus: data.Corpus, config: Config, mesh: Mesh, amax: dict | None = None) -> float:
    """Mean cross-entropy over the held-out sequences, at most `eval_batches` batches of them."""
    order = parameters.position_order(config, config.seq_len, mesh.shape["context"])

    def make_batch(index):
        rows = partial(data.eval_batch, corpus, index, batch=config.batch, seq_len=config.seq_len)
        return sharding.place(data.Batch, rows, config.batch, order, mesh)

    num_batches = -(-num_evaluated(corpus, config) // config.batch)
    sums, previous = np.zeros(2), (0.0, 0.0)  # of (cross-entropies, targets)
    for batch in data.prefetch(make_batch, range(num_batches)):
        running = eval_step(params, batch, amax)
        sums += jax.device_get(previous)  # at most two batches are in flight: simulated devices deadlock at 128
        previous = running
    total, count = sums + jax.device_get(previous)
    return total / count


def num_evaluated(corpus: data.Corpus, config: Config) -> int:
    """Number of held-out sequences in an evaluation."""
    return min(config.eval_batches * config.batch, data.num_sequences(corpus.held_out, config.seq_len))
