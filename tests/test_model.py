"""The arrays that a step of the model must not create."""

import numpy as np
import pytest
from support import SMALL, equations, trace

from config import Config


@pytest.mark.slow
@pytest.mark.parametrize("loss_chunk", [8, 12])
def test_no_array_has_the_logits_of_all_positions(loss_chunk):
    """No array of the step has a dim of the full vocabulary, if that is sharded, nor the size of all logits."""
    config = Config(**SMALL | dict(vocab_size=4096, batch=8, loss_chunk=loss_chunk), mesh="fsdp:4,tensor:2")
    b, c, v = config.batch // 4, config.loss_chunk, config.vocab_size // 2
    (per_device,) = (eqn for eqn in equations(trace(config)) if eqn.primitive.name == "shard_map")
    shapes = [var.aval.shape for eqn in equations(per_device.params["jaxpr"]) for var in eqn.outvars]
    logits = [shape for shape in shapes if shape[-1:] == (v,)]
    # The largest is a chunk of positions, with this device's shard of the vocabulary.
    assert max(np.prod(shape) for shape in logits) == b * c * v
    assert not [shape for shape in shapes if config.vocab_size in shape]
