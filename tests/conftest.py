"""Eight simulated devices for every test, and none of the noise of a missing TPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
