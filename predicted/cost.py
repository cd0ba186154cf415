"""The cost of a training run: FLOPs, days, chip-hours and money, by arithmetic. No jax here.

    python roofline.py cost --preset=llama3.1-70b --tokens=15e12 --chip=v5p --chips=8960 --mfu=0.4 --explain
    python roofline.py cost --preset=llama3.1-70b --tokens=15e12 --topology=tpu7x:8x8x8 --mesh=fsdp:1024 --batch=2048
    python roofline.py cost --preset=llama3.1-8b --chinchilla --chip=tpu7x --days=7 --mfu=0.4 --goodput=0.9 --price=10

**Work** (the scaling book: Austin et al. 2025, part 6, https://jax-ml.github.io/scaling-book/applied-training):

    FLOPs       = FLOPs a token * tokens            about 6 * parameters * tokens

The FLOPs of a token are those of predicted/transformer.py: matmuls without the embedding's look-up, attention at the
sequence length, nothing that is recomputed. Tokens are given, or those of the run (steps * batch * seq_len), or 20 a
parameter. At 20 a dense model reaches about the lowest loss that its FLOPs can buy (Hoffmann et al. 2022,
arXiv:2203.15556: Chinchilla, 70e9 parameters on 1.4e12 tokens).

**Time** needs the MFU, the share of the chips' peak that those FLOPs take, or the seconds of a step. Either is
measured, assumed or, for a slice and a mesh, predicted by predicted/step.py.

    busy_s      = FLOPs / (n * C * MFU)        or        steps * seconds of a step
    seconds     = busy_s / goodput
    chip-hours  = n * seconds / 3600           cost = chip-hours * price of one

So more chips cost no more as long as the MFU is the same. That is strong scaling, which has an end.

**Goodput** is the share of the time that is spent on steps that count. A checkpoint every I seconds stops the run for S
(0 if it is written while steps go on). There is a failure every F seconds on average. It costs the R seconds of a
restart, and the work since the last checkpoint, on average half an interval. For t useful seconds and w seconds in all,

    w           = t * (1 + S/I) + w/F * (R + (I + S)/2)
    goodput     = t/w = (1 - (R + (I + S)/2) / F) / (1 + S/I)

which is best at about I = sqrt(2*S*F) (Young 1974, "A first order approximation to the optimum checkpoint interval",
CACM 17(9)). F is that of all chips: the F of one chip, divided by their number. It must be much longer than I and R, as
failures during a restart are not counted. Failures are given, not predicted.

**Left out**: evaluation; runs that are given up; storage, hosts and network, unless the price includes them.
"""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass

import flags as flags_lib
from config import Config
from hardware import CHIPS, Chip, by, chip_of, parse_topology, si
from predicted import transformer
from predicted.step import describe_shortfall, predict
from predicted.workload import run_of

DAY_S, HOUR_S = 86_400, 3_600


# -- work


def train_flops(flops_per_token: float, tokens: float) -> float:
    return _positive("flops_per_token", flops_per_token) * _positive("tokens", tokens)


def chinchilla_tokens(params: float, tokens_per_param: float = 20) -> float:
    """The tokens at which a dense model reaches, roughly, the lowest loss that its FLOPs can buy."""
    return _positive("tokens_per_param", tokens_per_param) * _positive("params", params)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:  # NaN is not, either
        raise ValueError(f"{name}={value} must be over 0 and finite")
    return value


def _share(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value}: a share is over 0 and at most 1")
    return value


# -- goodput


def goodput(*, interval_s: float, save_s: float = 0, failure_s: float = math.inf, restart_s: float = 0) -> float:
    """The share of the time that is spent on steps that count; see the top.

    Args:
      interval_s: I, from one checkpoint to the next.
      save_s: S, the time that a checkpoint stops the run.
      failure_s: F, the mean time from one failure to the next, of all chips together.
      restart_s: R, from a failure to the next step.

    Raises:
      ValueError: failures are so frequent that the run makes no progress.
    """
    _positive("interval_s", interval_s)
    if not (min(save_s, restart_s) >= 0 and failure_s > 0):
        raise ValueError(f"save_s={save_s}, restart_s={restart_s} must be 0 or more, failure_s={failure_s} over 0")
    lost_s = restart_s + (interval_s + save_s) / 2
    if lost_s >= failure_s:
        raise ValueError(
            f"the run makes no progress: a failure loses {lost_s:,.4g} s, for the restart and half an interval, and "
            f"there is one every {failure_s:,.4g} s: {lost_s - failure_s:,.4g} s too soon"
        )
    return (1 - lost_s / failure_s) / (1 + save_s / interval_s)


def best_interval_s(save_s: float, failure_s: float) -> float:
    """The best time between checkpoints: sqrt(2*S*F), for F much longer than S."""
    return math.sqrt(2 * _positive("save_s", save_s) * _positive("failure_s", failure_s))


# -- time and money


@dataclass(frozen=True)
class TrainingRun:
    """A training run in figures."""

    flops: float
    num_chips: int
    mfu: float
    goodput: float
    busy_s: float  # for steps that count
    price_per_chip_hour: float | None  # in any currency

    @property
    def seconds(self) -> float:
        return self.busy_s / self.goodput

    @property
    def days(self) -> float:
        return self.seconds / DAY_S

    @property
    def chip_hours(self) -> float:
        return self.num_chips * self.seconds / HOUR_S

    @property
    def cost(self) -> float | None:
        return None if self.price_per_chip_hour is None else self.chip_hours * self.price_per_chip_hour


def training_run(
    flops: float,
    chip: Chip,
    num_chips: int,
    *,
    mfu: float | None = None,
    busy_s: float | None = None,
    dtype: str = "bf16",
    goodput: float = 1.0,
    price_per_chip_hour: float | None = None,
) -> TrainingRun:
    """Returns a run from its FLOPs and either its MFU or the seconds of its steps.

    Raises:
      ValueError: both or neither is given, or the chips cannot do the FLOPs in those seconds.
    """
    if (mfu is None) == (busy_s is None):
        raise ValueError(
            "give either an MFU or the seconds of a step: --mfu, --step_s, or --topology to predict the step"
        )
    if num_chips < 1:
        raise ValueError(f"num_chips={num_chips} must be 1 or more")
    if price_per_chip_hour is not None and not 0 <= price_per_chip_hour < math.inf:
        raise ValueError(f"price_per_chip_hour={price_per_chip_hour} must be 0 or more and finite")
    peak_s = _positive("flops", flops) / (num_chips * chip.flops_per_s(dtype))
    if busy_s is None:
        busy_s = peak_s / _share("mfu", mfu)
    elif peak_s > _positive("busy_s", busy_s):
        raise ValueError(
            f"{flops:.4g} FLOPs take {num_chips:,} {chip.name} {peak_s:,.4g} s at their peak, which no run reaches: "
            f"{busy_s:,.4g} s are too short by {peak_s - busy_s:,.4g} s at least"
        )
    return TrainingRun(flops, num_chips, peak_s / busy_s, _share("goodput", goodput), busy_s, price_per_chip_hour)


def chips_needed(
    flops: float, chip: Chip, days: float, *, mfu: float, dtype: str = "bf16", goodput: float = 1.0
) -> int:
    """The fewest chips that finish the FLOPs in a number of days."""
    on_one_chip = training_run(flops, chip, 1, mfu=mfu, dtype=dtype, goodput=goodput)
    return math.ceil(on_one_chip.days / _positive("days", days))


def check_fit(held_bytes: float, chip: Chip, num_chips: int, what: str = "the state") -> None:
    """Raises ValueError if the chips' HBM is too small, with the bytes that are missing."""
    available = num_chips * chip.hbm_bytes
    if held_bytes > available:
        raise ValueError(
            f"does not fit: {what} has {si(held_bytes, 'B')}, the HBM of {num_chips:,} {chip.name} "
            f"{si(available, 'B')}: short by {si(held_bytes - available, 'B')}; "
            f"{least_chips(held_bytes, chip):,} chips hold it"
        )


def least_chips(held_bytes: float, chip: Chip) -> int:
    return math.ceil(_positive("held_bytes", held_bytes) / chip.hbm_bytes)


# -- command line


def print_cost(args: argparse.Namespace) -> None:
    """Prints the work, time, chips and cost of a training run."""
    config = flags_lib.from_args(args)
    chip, num_chips, dtype, step_s, source = step_of(args, config)
    params = transformer.num_params(transformer.without_padding(config))
    per_token = transformer.train_flops_per_token(config)
    tokens, tokens_source = tokens_of(args, config)
    flops = train_flops(per_token, tokens)
    options = dict(dtype=dtype, goodput=args.goodput)
    if num_chips is None:
        if args.days is None or args.mfu is None:
            raise ValueError("cost needs --chips, or --days and --mfu to find them")
        num_chips = chips_needed(flops, chip, args.days, mfu=args.mfu, **options)
    state_bytes = sum(transformer.state_bytes(config).values())
    check_fit(state_bytes, chip, num_chips)
    tokens_per_step = config.batch * config.seq_len
    busy_s = None if step_s is None else tokens / tokens_per_step * step_s
    run = training_run(flops, chip, num_chips, mfu=args.mfu, busy_s=busy_s, price_per_chip_hour=args.price, **options)
    needed = None if args.days is None else chips_needed(flops, chip, args.days, mfu=run.mfu, **options)
    pod = max(chip.pods, key=math.prod)
    pods, peak = num_chips / math.prod(pod), si(chip.flops_per_s(dtype), "FLOP/s")
    if args.json:
        result = dict(kind="predicted", preset=config.preset, chip=chip.name, tokens=tokens, params=params)
        result |= dict(flops_per_token=per_token) | dataclasses.asdict(run)
        result |= dict(seconds=run.seconds, days=run.days, chip_hours=run.chip_hours, state_bytes=state_bytes)
        result |= dict(pods=pods, chips_for_days=needed, cost_in_the_currency_of_the_price=run.cost)
        return print(json.dumps(result))
    mfu_source = "given" if step_s is None else f"of the {source} {si(step_s, 's')} a step"
    state = f"{si(state_bytes, 'B')}, {si(state_bytes / num_chips, 'B')} of a chip's {si(chip.hbm_bytes, 'B')}"
    rule = f"6 * parameters * tokens = {6 * params * tokens:.4g}"
    print(f"{config.preset}, {tokens:,.0f} tokens ({tokens_source}) on {num_chips:,} {chip.name}, predicted")
    print(f"  work       {flops:.4g} FLOPs, {per_token:.4g} a token; {rule}")
    print(f"  MFU        {run.mfu:.1%} of {peak} a chip, {mfu_source}; goodput {run.goodput:.1%}, given")
    print(f"  time       {run.days:,.2f} days, {run.seconds:.4g} s")
    print(f"  chips      {run.chip_hours:,.0f} chip-hours; pods of {by(pod)}: {pods:.3g}")
    print(f"  state      {state}: weights, gradients, optimizer")
    if run.cost is not None:
        print(f"  cost       {run.cost:,.0f}, in the currency of the price, {args.price:g} a chip-hour, given")
    if needed is not None:
        print(f"  in {args.days:g} days {needed:,} chips, at the same MFU")
    if args.explain:
        steps = "" if step_s is None else f"{tokens:.4g} / {tokens_per_step:,} * {si(step_s, 's')}"
        print(explain(run, per_token, tokens, peak, steps))


def step_of(args: argparse.Namespace, config: Config) -> tuple[Chip, int | None, str, float | None, str]:
    """Returns (chip, number of chips, dtype of the matmuls, seconds of a step, whether given or predicted).

    What is neither given nor predicted is None.
    """
    chip = chip_of(args.chip or "tpu7x")
    if args.chips is not None and args.chips < 1:
        raise ValueError(f"--chips={args.chips} must be 1 or more")
    given = [value for value in (args.chips, args.step_s, args.mfu, args.chip) if value is not None]
    if args.topology and given:
        raise ValueError("--topology predicts the step: use it without --chip, --chips, --mfu and --step_s")
    if not given:  # a recipe has a topology
        args.topology, args.num_slices = flags_lib.slice_of(args)
    if not args.topology:
        return chip, args.chips, args.matmul_dtype, args.step_s, "given"
    chip, topology = parse_topology(args.topology)
    prediction = predict(run_of(config, chip, topology, num_slices=args.num_slices))
    if not prediction.fits:
        short = describe_shortfall(prediction.shortfall())
        raise ValueError(f"{config.preset} does not fit on {args.topology}, {short}; see: roofline.py step")
    return chip, prediction.run.num_chips, prediction.run.dtype, prediction.step_s, "predicted"


def tokens_of(args: argparse.Namespace, config: Config) -> tuple[float, str]:
    """Returns the tokens of a run and where they come from, in words."""
    if args.chinchilla and config.num_experts:
        raise ValueError(
            f"--chinchilla is for dense models, and {config.preset} has {config.num_experts} experts: use --tokens"
        )
    if args.chinchilla:
        params = transformer.num_params(transformer.without_padding(config))
        return chinchilla_tokens(params), f"20 * {params:,} parameters"
    if args.tokens is not None:
        return args.tokens, "given"
    tokens_per_step = config.batch * config.seq_len
    return config.steps * tokens_per_step, f"{config.steps:,} steps of {tokens_per_step:,}"


def explain(run: TrainingRun, per_token: float, tokens: float, peak: str, steps: str) -> str:
    """Returns the formulas of a run with its numbers in them.

    Args:
      peak: of a chip.
      steps: tokens / (batch * seq_len) * step, in numbers; empty if the MFU is given.
    """
    flops, busy, n = f"{run.flops:.4g}", f"{run.busy_s:.4g} s", f"{run.num_chips:,}"
    lines = [f"  FLOPs      FLOPs a token * tokens = {per_token:.4g} * {tokens:.4g} = {flops}"]
    if steps:
        lines.append(f"  busy       tokens / (batch * seq_len) * step = {steps} = {busy}")
        lines.append(f"  MFU        FLOPs / (n*C*busy) = {flops} / ({n} * {peak} * {busy}) = {run.mfu:.3g}")
    else:
        lines.append(f"  busy       FLOPs / (n*C*MFU) = {flops} / ({n} * {peak} * {run.mfu:g}) = {busy}")
    lines.append(f"  seconds    busy / goodput = {busy} / {run.goodput:g} = {run.seconds:.4g} s")
    lines.append(f"  chip-hours n * seconds / 3600 = {n} * {run.seconds:.4g} / 3600 = {run.chip_hours:.4g}")
    return "\n".join(lines)


def add_cost_command(commands) -> None:
    about = "FLOPs, days, chip-hours and money of a training run"
    usage = (
        "%(prog)s {--recipe=R | --topology=T | {--chips=N | --days=D} {--mfu=SHARE | --step_s=S}} [--flag=value ...]"
    )
    parser = commands.add_parser("cost", help=about, description=about, allow_abbrev=False, usage=usage)
    parser.set_defaults(run=print_cost, parser=parser)
    flags_lib.add_flags(parser)
    group = parser.add_argument_group("cost")
    tokens = group.add_mutually_exclusive_group()
    tokens.add_argument("--tokens", type=float, help="tokens of the run, as in 15e12; default: steps * batch * seq_len")
    tokens.add_argument("--chinchilla", action="store_true", help="20 tokens a parameter")
    about = "slice, as in tpu7x:4x4x4, on which the step is predicted, with --mesh and so on; default: a recipe's"
    group.add_argument("--topology", help=about)
    group.add_argument("--num_slices", type=int, help="number of such slices [the recipe's, else 1]")
    parser.set_defaults(default_topology=None)
    group.add_argument("--chip", help=f"kind of chip: {', '.join(CHIPS)} ['tpu7x']")
    group.add_argument("--chips", type=int, metavar="N", help="chips of the run; default: as many as --days needs")
    group.add_argument("--days", type=float, help="days in which to finish: finds the number of chips")
    group.add_argument("--mfu", type=float, metavar="SHARE", help="share of the peak, as in 0.4: assumed or measured")
    group.add_argument("--step_s", type=float, metavar="S", help="seconds of a step, in place of an MFU")
    about = "share of the time that is spent on steps that count [%(default)s]"
    group.add_argument("--goodput", type=float, default=1.0, metavar="SHARE", help=about)
    about = "type of the matmuls, whose peak the MFU is of: bf16, fp8 or int8 [%(default)s]"
    group.add_argument("--matmul_dtype", default="bf16", metavar="DTYPE", help=about)
    group.add_argument("--price", type=float, help="price of a chip-hour, in any currency; without it no cost is shown")
    group.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    group.add_argument("--json", action="store_true", help="a JSON object, in FLOPs, bytes, seconds, days, hours")
