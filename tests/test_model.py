"""What the model as a whole does not hold."""

import numpy as np
import pytest
from support import SMALL, equations, trace

from config import Config


@pytest.mark.slow
@pytest.mark.parametrize("loss_chunk", [8, 12])
def test_logits_of_the_whole_sequence_exist_nowhere(loss_chunk):
    """Nor of the whole vocabulary, where it is cut: no array of the step has their size."""
    config = Config(**SMALL | dict(vocab_size=4096, batch=8, loss_chunk=loss_chunk), mesh="fsdp:4,tensor:2")
    b, c, v = config.batch // 4, config.loss_chunk, config.vocab_size // 2
    (per_device,) = (eqn for eqn in equations(trace(config)) if eqn.primitive.name == "shard_map")
    shapes = [var.aval.shape for eqn in equations(per_device.params["jaxpr"]) for var in eqn.outvars]
    logits = [shape for shape in shapes if shape[-1:] == (v,)]
    assert max(np.prod(shape) for shape in logits) == b * c * v  # a chunk's, of this device's part of the vocabulary
    assert not [shape for shape in shapes if config.vocab_size in shape]
