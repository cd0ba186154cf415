"""Eight simulated devices for every test, the TPU7x compiler at hand, and none of the noise of a missing TPU."""

import compiler_flags

compiler_flags.without_tpu()

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
