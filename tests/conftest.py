"""Eight simulated devices for every test, the TPU7x compiler at hand, and none of the noise of a missing TPU."""

import os

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu describes and compiles for TPU7x without one, if it does not look for one
    "TPU_ACCELERATOR_TYPE": "tpu7x-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several test processes at once
    "TF_CPP_MIN_LOG_LEVEL": "2",
}.items():
    os.environ.setdefault(name, value)

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
