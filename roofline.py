"""Predicts what work must cost, by arithmetic alone, in milliseconds. No jax here.

    python roofline.py matmul --m=8192 --k=8192 --n=28672 --explain
    python roofline.py matmul "A[I_X, J] . B[J_X, K_Y] -> C[I_X, K_Y]" --sizes=I:8192,J:8192,K:28672 --mesh=X:4,Y:8
    python roofline.py collective all_reduce --bytes=1e9 --topology=tpu7x:4x4x4 --explain
    python roofline.py collective scaling --plot=scaling.png
    python roofline.py step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --batch=256 --remat=save_qkv_proj --explain

**Idea.** A roofline is the larger of two times: FLOPs over the peak of a chip, and bytes over the bandwidth of the
memory or the links. Each command has a file in predicted/: matmul.py, interconnect.py (collective), bounds.py, step.py,
planner.py (plan), recompute.py (remat), cost.py, serving.py (serve) and transformer.py (model). The figures of the
chips are in hardware.py.
"""

from collections.abc import Sequence

import command
from predicted import page
from predicted.bounds import add_bounds_command
from predicted.cost import add_cost_command
from predicted.interconnect import add_collective_command
from predicted.matmul import add_matmul_command
from predicted.planner import add_plan_command
from predicted.presentation import add_step_command
from predicted.recompute import add_remat_command
from predicted.serving import add_serve_command
from predicted.transformer import add_model_command


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__, usage="%(prog)s COMMAND ... [--flag=value ...]")
    commands = parser.add_subparsers(prog="roofline.py", metavar="COMMAND", required=True)
    add_matmul_command(commands)
    add_collective_command(commands)
    add_bounds_command(commands)
    add_step_command(commands, page.write)
    add_plan_command(commands)
    add_remat_command(commands)
    add_cost_command(commands)
    add_serve_command(commands)
    add_model_command(commands)
    args = command.arguments(parser, argv)
    args.run(args)


if __name__ == "__main__":
    command.run(main)
