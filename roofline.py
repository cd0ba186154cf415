"""Predict before you run: what work must cost, by arithmetic alone, in milliseconds. No jax here.

    python roofline.py matmul --m=8192 --k=8192 --n=28672 --explain
    python roofline.py matmul "A[I_X, J] . B[J_X, K_Y] -> C[I_X, K_Y]" --sizes=I:8192,J:8192,K:28672 --mesh=X:4,Y:8
    python roofline.py collective all_reduce --bytes=1e9 --topology=tpu7x:4x4x4 --explain
    python roofline.py collective scaling --plot=scaling.png

A roofline is the larger of two times: FLOPs over the peak of a chip, and bytes over the bandwidth of the memory, or of
the links, that they go through. A file for each command: matmul.py (a matmul, sharded or not) and interconnect.py (a
collective), on the chips of hardware.py. What a model is made of, in parameters, FLOPs and bytes, tells transformer.py.
"""

import argparse
from collections.abc import Sequence

from interconnect import add_collective_command
from matmul import add_matmul_command


def main(argv: Sequence[str] | None = None) -> None:
    about, examples, *_ = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        prog="roofline.py",
        usage="%(prog)s COMMAND ... [--flag=value ...]",
        description=about,
        epilog=f"for example:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(prog="roofline.py", metavar="COMMAND", required=True)
    add_matmul_command(commands)
    add_collective_command(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
