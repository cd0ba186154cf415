"""The cost of the simulated mesh: a training step on 8 simulated devices against a plain jit on one, on the same cores.

    python benchmarks/one_device.py [any flag of train.py]

The plain version is reference.py with the same optimizer, weights and global batch. Their steps alternate in one run,
because such machines are noisy. The figure is the median of the ratios, with the quartiles.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from functools import partial

import jax
import numpy as np
import optax

import command
import data
import data_mixtures
import flags as flags_lib
import placement
import processes
import reference
import rules
import sharding
import train


def main() -> None:
    config = flags_lib.parse_flags(__file__)
    processes.start(config)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), core_axis=config.core_axis)
    config = rules.settled(config, dict(mesh.shape))
    rules.check(config, dict(mesh.shape))
    corpus = data_mixtures.open_mixture(config.corpus)
    corpus.check(config.seq_len, config.vocab_size)
    rows = partial(data.train_batch, corpus, 0, batch=config.batch, seq_len=config.seq_len, seed=config.seed)
    batch = sharding.place(data.Batch, rows, config.batch, np.arange(config.seq_len), mesh)
    layout = train.state_shardings(config, mesh)
    state = jax.jit(partial(train.init_state, config=config), out_shardings=layout)(jax.random.key(0))
    meshed = train.make_train_step(config, mesh).lower(state, batch).compile()

    optimizer, _ = train.make_optimizer(config)

    def plain_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(reference.loss)(params, batch, config)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state, plain_batch = jax.device_put(
        jax.device_get((state.params, state.opt_state, rows())), jax.devices()[0]
    )
    plain = jax.jit(plain_step, donate_argnums=(0, 1)).lower(params, opt_state, plain_batch).compile()

    seconds = {"mesh": [], "one device": []}
    for iteration in range(16):
        begun = time.perf_counter()
        state, metrics = meshed(state, batch)
        metrics["loss"].block_until_ready()
        halfway = time.perf_counter()
        params, opt_state, loss = plain(params, opt_state, plain_batch)
        loss.block_until_ready()
        if iteration:  # the first of each warms up
            seconds["mesh"].append(halfway - begun)
            seconds["one device"].append(time.perf_counter() - halfway)
    for name, values in seconds.items():
        print(f"measured  {name:10}  median {statistics.median(values):.3f} s, {min(values):.3f} to {max(values):.3f}")
    ratios = [mesh_s / plain_s for mesh_s, plain_s in zip(*seconds.values(), strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    text = f"{median:.2f} x the time of one device ({low:.2f} to {high:.2f})"
    print(f"measured  {sharding.describe_mesh(mesh)}: {text}")
    print(f"          losses after {iteration + 1} steps: {metrics['loss']:.6f} and {loss:.6f}")


if __name__ == "__main__":
    command.run(main)
