"""Spikes: a step whose loss or gradient norm is far above those of the last steps is skipped.

**Idea.** A batch of broken text, or a bad state of the optimizer, gives a loss or a gradient norm far outside its usual
range. One such update can cost thousands of steps, or the run. So the step compares both with their last values, and
leaves everything as it was where one of them is too high. The batch is not tried again.

**Formula.** Of the last 128 losses, m is the mean and s the standard deviation (with 127 in the denominator). A step is
a spike if its loss exceeds the limit m + N s, with N = --skip_spikes; the same for the gradient norm. Values below the
mean are none. The first 64 steps are taken as they are.

**What a spike leaves behind.** The history takes in min(value, limit). If it took in the spike itself, one value of
1,000 would raise the limit beyond all others for 128 steps. If it took in nothing, a lasting change of level (of the
corpus, say) would be skipped forever. The limit as a value raises s a little: after a change of level the limit climbs
until steps are accepted again, unless --max_skipped of them in a row have ended the run before. A value that is not
finite is skipped in any case, and not taken in.

**Layout.** The history is 2 x 128 numbers, a part of the optimizer state, so a checkpoint has it. It is replicated, and
every device makes its decision by itself. All decide alike: a loss and a norm are results of all-reduces, which give
every device the same bits.

**Cost.** None: 256 numbers a step, and no wait for the host.

**Source.** OLMo-core's SkipStepOptimizer (window, threshold of 6, both values, from half a window on); OLMo 2,
arXiv:2501.00656, on spikes. It takes every value in, the spikes, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from config import Config

WINDOW = 128  # values that are remembered
ENOUGH = WINDOW // 2  # values from which on a step is judged


class History(NamedTuple):
    """The last losses and gradient norms, and counts."""

    loss_w: jax.Array  # float32 [WINDOW], in the order of a ring
    grad_norm_w: jax.Array  # the same
    taken: jax.Array  # int32: values taken in so far
    spikes: jax.Array  # int32: steps skipped as spikes


class Guarded(NamedTuple):
    """An optimizer state with the history beside it."""

    optimizer: Any
    history: History


def guarded(opt_state, config: Config):
    """Returns an optimizer's first state, with an empty history where the run skips spikes."""
    if not config.skip_spikes:
        return opt_state
    empty, zero = np.zeros(WINDOW, np.float32), np.int32(0)  # of numpy: each becomes a buffer of its own
    return Guarded(opt_state, History(empty, empty, zero, zero))


def split(opt_state, config: Config) -> tuple[Any, History | None]:
    """Returns the state of the optimizer itself, and the history; None where the run skips no spikes."""
    return (opt_state.optimizer, opt_state.history) if config.skip_spikes else (opt_state, None)


def joined(opt_state, history: History | None):
    """Returns what `split` was given."""
    return opt_state if history is None else Guarded(opt_state, history)


def judged(history: History, loss: jax.Array, grad_norm: jax.Array, deviations: float) -> tuple[jax.Array, History]:
    """Returns (whether a step is to be accepted, the history after it). Values that are not finite are not accepted.

    Args:
      loss, grad_norm: of the step, float32 scalars.
      deviations: N of the formula above.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    limits = [_limit(window_w, history.taken, deviations) for window_w in history[:2]]
    is_spike = finite & ((loss > limits[0]) | (grad_norm > limits[1]))
    place = history.taken % WINDOW
    windows = [
        jnp.where(finite, window_w.at[place].set(jnp.minimum(value, limit)), window_w)
        for window_w, value, limit in zip(history[:2], (loss, grad_norm), limits, strict=True)
    ]
    return finite & ~is_spike, History(*windows, history.taken + finite, history.spikes + is_spike)


def _limit(window_w: jax.Array, taken: jax.Array, deviations: float) -> jax.Array:
    """Returns the largest value that is no spike; infinity as long as there are too few values."""
    is_value_w = jnp.arange(WINDOW) < taken
    count = jnp.minimum(taken, WINDOW)
    mean = jnp.sum(window_w) / count  # places without a value are 0
    variance = jnp.sum(jnp.where(is_value_w, window_w - mean, 0) ** 2) / (count - 1)
    return jnp.where(count >= ENOUGH, mean + deviations * jnp.sqrt(variance), jnp.inf)
