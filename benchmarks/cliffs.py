"""The cost of sizes just below and above each round one: which cost much more than their neighbours?

    python benchmarks/cliffs.py            the table; compiles nothing

The cost of a step is the seconds that roofline.py predicts for each FLOP of the model, on tpu7x:2x2x1 with one sequence
a device; the cost of attention is that of its own FLOPs. The cost of experts is groups.slowdown of their tiles: narrow
tiles, for which HBM cannot feed the matrix units, and overlapping tiles cost more. A size above 1.3 times the cheapest,
or one that is refused, has its reason here. `roofline.py step`, and train.py as it starts, name it (step.cliffs).

Compiled, one layer of Llama 3.1 8B on fsdp:8, a sequence a device: 90.0 ms for 8,192 tokens, 87.0 ms for 8,191, a
prime.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax.numpy as jnp

import command
import groups
from flags import from_preset
from hardware import parse_topology
from predicted import transformer
from predicted.step import predict
from predicted.workload import run_of

LIMIT = 1.3
DENSE = dict(preset="llama3.1-8b", num_layers=2, mesh="data:8", batch=8, remat="none")
MIXTURE = dict(preset="qwen3-30b-a3b", num_layers=2, mesh="data:8", batch=8, remat="none")


def step_s(**flags) -> float:
    """Predicted seconds for each FLOP of the model."""
    prediction = predict(run_of(from_preset(**flags), *parse_topology("tpu7x:2x2x1")))
    return prediction.step_s / prediction.flops_per_step


def attention_s(T: int) -> float:
    """Predicted seconds of attention for each FLOP of attention."""
    prediction = predict(run_of(from_preset(**DENSE, seq_len=T), *parse_topology("tpu7x:2x2x1")))
    (part,) = (part for part in prediction.parts if part.name == "attention")
    return part.seconds / T / transformer.mean_keys(T)


def expert_s(K: int, N: int) -> float | None:
    """The time of x [rows, K] times each expert's [K, N], and of its gradients, over that of the matrix units alone.

    None where the shape is refused.
    """
    shape = (65_536, K, N, 16, jnp.bfloat16)
    try:
        tiles = [groups.default_tiles(*shape), groups.default_tgmm_tiles(*shape)]
    except ValueError:
        return None
    return max(groups.slowdown(each, K, N) for each in tiles)


@dataclass(frozen=True)
class Sweep:
    """Neighbouring sizes and their cost; `why` one of them costs more than LIMIT times the cheapest."""

    name: str
    sizes: tuple[int, ...]
    cost: Callable[[int], float | None]
    why: str = ""


def around(size: int, step: int = 1) -> tuple[int, ...]:
    return size - step, size, size + step


def _step_cost(model: dict, name: str, **more) -> Callable[[int], float]:
    return lambda size: step_s(**model | more | {name: size})


SWEEPS = [
    *(Sweep("seq_len", around(T), _step_cost(DENSE, "seq_len")) for T in (1024, 8192, 131_072)),
    Sweep("batch", around(64, 8), _step_cost(DENSE, "batch")),
    *(Sweep("vocab_size", around(V), _step_cost(DENSE, "vocab_size")) for V in (50_257, 128_256)),
    *(Sweep("loss_chunk", around(c), _step_cost(DENSE, "loss_chunk")) for c in (1024, 4096)),
    *(Sweep("model_dim", around(D), _step_cost(DENSE, "model_dim")) for D in (2048, 4096)),
    Sweep("model_dim, fsdp:8", around(4096, 8), _step_cost(DENSE, "model_dim", mesh="fsdp:8")),
    Sweep("model_dim, fsdp:2,expert:4", around(2048, 8), _step_cost(MIXTURE, "model_dim", mesh="fsdp:2,expert:4")),
    *(Sweep("ff_dim", around(F), _step_cost(DENSE, "ff_dim")) for F in (4096, 14_336)),
    *(Sweep("num_heads", around(N), _step_cost(DENSE, "num_heads", num_kv_heads=1)) for N in (16, 32)),
    *(Sweep("head_dim", around(H, 2), _step_cost(DENSE, "head_dim")) for H in (128, 256)),
    Sweep("window", around(1024), _step_cost(DENSE, "window")),
    *(Sweep("num_experts", around(E), _step_cost(MIXTURE, "num_experts")) for E in (64, 128)),
    Sweep("expert_dim", around(768), _step_cost(MIXTURE, "expert_dim")),
    *(
        Sweep("attention, seq_len", around(T), attention_s, "a tile of 512 queries and keys more, almost empty")
        for T in (1024, 2048)
    ),
    *(Sweep("attention, seq_len", around(T), attention_s) for T in (4096, 8192, 131_072)),
    *(Sweep("columns of experts, K 2048", around(M, 128), lambda M: expert_s(2048, M)) for M in (768, 1408)),
    Sweep("columns of experts, K 4096", around(1536, 128), lambda M: expert_s(4096, M)),
    Sweep("columns of experts, K 4096", around(14_336, 128), lambda M: expert_s(4096, M)),
    Sweep("columns of experts, K 7168", around(2048, 128), lambda M: expert_s(7168, M)),
    Sweep("columns of experts, K 4096", around(14_336), lambda M: expert_s(4096, M)),
]


def ratios(sweep: Sweep) -> dict[int, float | None]:
    """{size: its cost over that of the cheapest size, None where it is refused}."""
    costs = {size: sweep.cost(size) for size in sweep.sizes}
    least = min(cost for cost in costs.values() if cost is not None)
    return {size: None if cost is None else cost / least for size, cost in costs.items()}


def table() -> str:
    lines = ["| what | sizes: cost over that of the cheapest | why |", "|---|---|---|"]
    for sweep in SWEEPS:
        costs = ratios(sweep)
        shown = ", ".join(f"{size:,}: " + ("refused" if x is None else f"{x:.2f}") for size, x in costs.items())
        above = any(x is None or x > LIMIT for x in costs.values())
        lines.append(f"| {sweep.name} | {shown} | {sweep.why if above else ''} |")
    return "\n".join(lines)


def main() -> None:
    command.arguments(command.parser(__file__))
    print(table())


if __name__ == "__main__":
    command.run(main)
