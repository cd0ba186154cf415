"""Schedules: the learning rate of each update, and what a resumed run may change of them.

**Idea.** The rate rises linearly to its peak (warm-up), and falls to a share of it at the end. A cosine falls from the
warm-up on, so the number of steps must be known at the start, and a run that is extended has had too low a rate. With
warm-up-stable-decay (wsd) the rate stays at its peak, and falls only in the last steps (the decay). So a checkpoint of
the stable phase is a start for both: a longer stable phase, or a decay from here that gives a finished model.

**Formula.** Update n, from 1, of N steps has the rate peak * s(n). Steps that are skipped are no updates. Let W =
warmup_ratio N and D = decay_ratio N be whole numbers of updates (rounded down), f = final_lr_ratio:

    warm-up     n / W                                                    n < W
    cosine      f + (1 - f) (1 + cos(pi x)) / 2,   x = (n - W) / (N - W)
    wsd         1 until n = N - D; then x = (n - (N - D)) / D and
      linear    1 - (1 - f) x
      1-sqrt    1 - (1 - f) sqrt(x)
    constant    1

A batch that grows in stages (`--batch_rampup`) leaves the rate of an update as it is.

**Resume.** A run may go on with other numbers of a schedule if it stays continuous: s(n) of its next update is the
same by the flags of the checkpoint and by the new ones. So a stable phase can be extended or decayed, and a run that is
in its warm-up or its decay cannot be. Two cosines are the exception: the rate may jump, as the note on --steps says.

**Source.** Loshchilov & Hutter 2017, arXiv:1608.03983 (cosine); Hu et al. 2024, MiniCPM, arXiv:2404.06395 (wsd);
Haegele et al. 2024, arXiv:2405.18392 (1-sqrt, and how much decay a run needs: 10 to 20% of the steps).
"""

from collections.abc import Mapping
from types import SimpleNamespace

import jax.numpy as jnp
import optax

from config import Config

# Flags that decide the share of the peak that each update has.
FLAGS = ("schedule", "steps", "warmup_ratio", "decay_ratio", "decay_shape", "final_lr_ratio")


def learning_rate(config: Config) -> optax.Schedule:
    """Returns {number of updates done: learning rate of the next one}, a function of an integer or an int32 array."""
    peak, steps = config.learning_rate, config.steps
    warmup, final = int(config.warmup_ratio * steps), peak * config.final_lr_ratio
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0, peak_value=peak, warmup_steps=warmup, decay_steps=steps, end_value=final
        )
    else:
        phases = [optax.linear_schedule(0.0, peak, max(warmup, 1)), optax.constant_schedule(peak)]
        ends = [warmup]  # the update from which on the next phase decides
        if config.schedule == "wsd":
            phases.append(_decay(config, peak, final))
            ends.append(decay_begin(config))
        schedule = optax.join_schedules(phases, ends)
    return lambda count: schedule(count + 1)  # so that the first update is not lost to a rate of 0


def _decay(config: Config, peak: float, final: float) -> optax.Schedule:
    """Returns the rate by the number of updates since the decay began."""
    length = config.steps - decay_begin(config)
    if config.decay_shape == "linear":
        return optax.linear_schedule(peak, final, length)
    return lambda count: peak - (peak - final) * jnp.sqrt(jnp.clip(count / length, 0, 1))


def decay_begin(config: Config) -> int:
    """Returns the last update of the stable phase of schedule=wsd."""
    return config.steps - int(config.decay_ratio * config.steps)


def continuation(before: Mapping[str, object], config: Config, updates: int) -> str:
    """Returns a note on how the learning rate of a resumed run goes on.

    It is empty if the schedule is that of the checkpoint, or both are cosines.

    Args:
      before: {flag: value} of the run that saved the checkpoint; flags that it did not have had their defaults.
      updates: updates done.

    Raises ValueError where the rate would jump.
    """
    saved = SimpleNamespace(**{name: before.get(name, getattr(Config, name)) for name in FLAGS}, learning_rate=1.0)
    wanted = SimpleNamespace(**{name: getattr(config, name) for name in FLAGS}, learning_rate=1.0)
    if saved == wanted or saved.schedule == wanted.schedule == "cosine":
        return ""
    shares = [float(learning_rate(each)(updates)) for each in (saved, wanted)]
    if abs(shares[0] - shares[1]) > 1e-5:
        unused = {"wsd": (), "cosine": FLAGS[3:5], "constant": FLAGS[3:]}[saved.schedule]
        differing = [name for name in FLAGS if getattr(saved, name) != getattr(wanted, name) and name not in unused]
        raise ValueError(
            f"the learning rate would jump at update {updates + 1}, from {shares[0]:.1%} of its peak to "
            f"{shares[1]:.1%}: the checkpoint's {_phase(saved, updates)}; resume with "
            f"{' '.join(f'--{name}={getattr(saved, name)}' for name in differing)}, or from a checkpoint of a stable "
            "phase"
        )
    return f"the learning rate goes on at {shares[0]:.1%} of its peak, and {_phase(wanted, updates)}"


def _phase(config, updates: int) -> str:
    """Returns what the schedule does from the next update on, such as `decays (linear) from update 270 on, ...`."""
    warmup, final = int(config.warmup_ratio * config.steps), f"to {config.final_lr_ratio:.1%} at update {config.steps}"
    if updates + 1 < warmup:
        return f"rises until update {warmup}"
    if config.schedule == "constant":
        return "stays there"
    if config.schedule == "cosine":
        return f"falls by a cosine {final}"
    return f"decays ({config.decay_shape}) from update {decay_begin(config)} on, {final}"
