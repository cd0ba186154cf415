"""What a whole training run takes, by arithmetic: FLOPs, days, chip-hours, money. No jax here.

    python roofline.py cost --preset=llama3.1-70b --tokens=15e12 --chip=v5p --chips=8960 --mfu=0.4 --explain
    python roofline.py cost --preset=llama3.1-70b --tokens=15e12 --topology=tpu7x:8x8x8 --mesh=fsdp:1024 --batch=2048
    python roofline.py cost --preset=llama3.1-8b --chinchilla --chip=tpu7x --days=7 --mfu=0.4 --goodput=0.9 --price=10

**Work.** With the scaling book (Austin et al. 2025, part 6, https://jax-ml.github.io/scaling-book/applied-training),

    FLOPs       = FLOPs a token * tokens            about 6 * parameters * tokens

Here the FLOPs of a token are transformer.py's: matmuls without the embedding's look-up, attention at the sequence
length, nothing that is recomputed. Tokens are given, or those of the run (steps * batch * seq_len), or 20 a parameter,
at which a dense model's loss is about the least that its FLOPs can buy (Hoffmann et al. 2022, arXiv:2203.15556:
Chinchilla, 70e9 parameters on 1.4e12 tokens).

**Time** needs the MFU, that is the share of the chips' peak that those FLOPs use up, or the seconds of a step:
measured, assumed, or, for a slice and a mesh, predicted by step.py.

    busy_s      = FLOPs / (n * C * MFU)        or        steps * seconds of a step
    seconds     = busy_s / goodput
    chip-hours  = n * seconds / 3600           cost = chip-hours * price of one

So more chips cost no more, as long as the MFU is the same: that is strong scaling, and it ends.

**Goodput**: the share of the time in which steps are done that count. A checkpoint every I seconds stops the run for S
(0 if it is written while steps go on). A failure, one every F seconds on average, takes R to start again and what was
done since the last checkpoint, half an interval on average. Of t useful seconds and w seconds in all,

    w           = t * (1 + S/I) + w/F * (R + (I + S)/2)
    goodput     = t/w = (1 - (R + (I + S)/2) / F) / (1 + S/I)

which is best at about I = sqrt(2*S*F) (Young 1974, "A first order approximation to the optimum checkpoint interval",
CACM 17(9)). F is of all chips: that of one, divided by their number. It must be much longer than I and R: failures
while starting again are not counted. Failures are given, they are not predicted.

**Left out**: evaluation, runs that are given up, storage, hosts and network, if the price does not include them.
"""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass

import flags as flags_lib
from hardware import CHIPS, Chip, by, chip_of, parse_topology, si
from predicted import transformer
from predicted.step import describe_shortfall, predict
from predicted.workload import run_of

DAY_S, HOUR_S = 86_400, 3_600


# -- work


def train_flops(flops_per_token: float, tokens: float) -> float:
    return _positive("flops_per_token", flops_per_token) * _positive("tokens", tokens)


def chinchilla_tokens(params: float, tokens_per_param: float = 20) -> float:
    """Tokens on which a dense model of so many parameters is trained best for its FLOPs, roughly."""
    return _positive("tokens_per_param", tokens_per_param) * _positive("params", params)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:  # NaN is not, either
        raise ValueError(f"{name}={value} must be over 0, and finite")
    return value


def _share(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value}: a share is over 0 and at most 1")
    return value


# -- what is lost


def goodput(*, interval_s: float, save_s: float = 0, failure_s: float = math.inf, restart_s: float = 0) -> float:
    """Share of the time that counts; see the top.

    Args:
      interval_s: I, from one checkpoint to the next.
      save_s: S, that a checkpoint stops the run.
      failure_s: F, from one failure to the next, on average, of all chips together.
      restart_s: R, from a failure until steps are done again.

    Raises:
      ValueError: failures come so fast that nothing is done.
    """
    _positive("interval_s", interval_s)
    if not (min(save_s, restart_s) >= 0 and failure_s > 0):
        raise ValueError(f"save_s={save_s}, restart_s={restart_s} must be 0 or more, failure_s={failure_s} over 0")
    lost_s = restart_s + (interval_s + save_s) / 2
    if lost_s >= failure_s:
        raise ValueError(
            f"the run stands still: a failure loses {lost_s:,.4g} s, of restart and half an interval, and they come "
            f"every {failure_s:,.4g} s: {lost_s - failure_s:,.4g} s too soon"
        )
    return (1 - lost_s / failure_s) / (1 + save_s / interval_s)


def best_interval_s(save_s: float, failure_s: float) -> float:
    """sqrt(2*S*F), for F much longer than S."""
    return math.sqrt(2 * _positive("save_s", save_s) * _positive("failure_s", failure_s))


# -- time and money


@dataclass(frozen=True)
class TrainingRun:
    flops: float
    num_chips: int
    mfu: float
    goodput: float
    busy_s: float  # steps that count
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
    """A run of so many FLOPs at an MFU, or in so many seconds of steps; the one gives the other.

    Raises:
      ValueError: not one of the two, or more FLOPs in those seconds than the chips have.
    """
    if (mfu is None) == (busy_s is None):
        raise ValueError(
            "a run has an MFU or seconds of a step, one of the two: --mfu, --step_s, or --topology to predict it"
        )
    if num_chips < 1:
        raise ValueError(f"num_chips={num_chips} must be 1 or more")
    if price_per_chip_hour is not None and not 0 <= price_per_chip_hour < math.inf:
        raise ValueError(f"price_per_chip_hour={price_per_chip_hour} must be 0 or more, and finite")
    peak_s = _positive("flops", flops) / (num_chips * chip.flops_per_s(dtype))
    if busy_s is None:
        busy_s = peak_s / _share("mfu", mfu)
    elif peak_s > _positive("busy_s", busy_s):
        raise ValueError(
            f"{flops:.4g} FLOPs take {num_chips:,} {chip.name} {peak_s:,.4g} s at their peak, which nothing reaches: "
            f"{busy_s:,.4g} s are too short by {peak_s - busy_s:,.4g} s at least"
        )
    return TrainingRun(flops, num_chips, peak_s / busy_s, _share("goodput", goodput), busy_s, price_per_chip_hour)


def chips_needed(
    flops: float, chip: Chip, days: float, *, mfu: float, dtype: str = "bf16", goodput: float = 1.0
) -> int:
    """The fewest chips that are done in so many days."""
    one = training_run(flops, chip, 1, mfu=mfu, dtype=dtype, goodput=goodput)
    return math.ceil(one.days / _positive("days", days))


def check_fit(held_bytes: float, chip: Chip, num_chips: int, what: str = "the state") -> None:
    """Raises ValueError, with what is short and by how much."""
    has = num_chips * chip.hbm_bytes
    if held_bytes > has:
        raise ValueError(
            f"does not fit: {what} has {si(held_bytes, 'B')}, the HBM of {num_chips:,} {chip.name} {si(has, 'B')}: "
            f"short by {si(held_bytes - has, 'B')}; {least_chips(held_bytes, chip):,} chips hold it"
        )


def least_chips(held_bytes: float, chip: Chip) -> int:
    return math.ceil(_positive("held_bytes", held_bytes) / chip.hbm_bytes)


# -- command line


def print_cost(args: argparse.Namespace) -> None:
    config, chip = flags_lib.from_args(args), chip_of(args.chip or "tpu7x")
    num_chips, step_s, source, dtype = args.chips, args.step_s, "given", args.matmul_dtype
    if num_chips is not None and num_chips < 1:
        raise ValueError(f"--chips={num_chips} must be 1 or more")
    given = [one for one in (args.chips, args.step_s, args.mfu, args.chip) if one is not None]
    if args.topology and given:
        raise ValueError("--topology has its step predicted: no --chip, --chips, --mfu or --step_s beside it")
    if not given:  # nor a recipe's topology
        args.topology, args.num_slices = flags_lib.slice_of(args)
    if args.topology:
        chip, topology = parse_topology(args.topology)
        prediction = predict(run_of(config, chip, topology, num_slices=args.num_slices))
        if not prediction.fits:
            short = describe_shortfall(prediction.shortfall())
            raise ValueError(f"{config.preset} does not fit on {args.topology}, {short}; see: roofline.py step")
        num_chips, step_s, source = prediction.run.num_chips, prediction.step_s, "predicted"
        dtype = prediction.run.dtype
    params, per_token = transformer.num_params(config), transformer.train_flops_per_token(config)
    tokens_per_step = config.batch * config.seq_len
    tokens, of_tokens = config.steps * tokens_per_step, f"{config.steps:,} steps of {tokens_per_step:,}"
    if args.chinchilla and config.num_experts:
        raise ValueError(f"--chinchilla is of dense models, {config.preset} has {config.num_experts} experts: --tokens")
    if args.chinchilla:
        tokens, of_tokens = chinchilla_tokens(params), f"20 * {params:,} parameters"
    elif args.tokens is not None:
        tokens, of_tokens = args.tokens, "given"
    flops = train_flops(per_token, tokens)
    options = dict(dtype=dtype, goodput=args.goodput)
    if num_chips is None:
        if args.days is None or args.mfu is None:
            raise ValueError("it needs --chips, or --days and --mfu to find them")
        num_chips = chips_needed(flops, chip, args.days, mfu=args.mfu, **options)
    state_bytes = sum(transformer.state_bytes(config).values())
    check_fit(state_bytes, chip, num_chips)
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
    given = "given" if busy_s is None else f"of the {source} {si(step_s, 's')} a step"
    state = f"{si(state_bytes, 'B')}, {si(state_bytes / num_chips, 'B')} of a chip's {si(chip.hbm_bytes, 'B')}"
    rule = f"6 * parameters * tokens = {6 * params * tokens:.4g}"
    print(f"{config.preset}, {tokens:,.0f} tokens ({of_tokens}) on {num_chips:,} {chip.name}, predicted")
    print(f"  work       {flops:.4g} FLOPs, {per_token:.4g} a token; {rule}")
    print(f"  MFU        {run.mfu:.1%} of {peak} a chip, {given}; goodput {run.goodput:.1%}, given")
    print(f"  time       {run.days:,.2f} days, {run.seconds:.4g} s")
    print(f"  chips      {run.chip_hours:,.0f} chip-hours; pods of {by(pod)}: {pods:.3g}")
    print(f"  state      {state}: weights, gradients, optimizer")
    if run.cost is not None:
        print(f"  cost       {run.cost:,.0f}, in the currency of the price, {args.price:g} a chip-hour, given")
    if needed is not None:
        print(f"  in {args.days:g} days {needed:,} chips, at the same MFU")
    if args.explain:
        total, busy = f"{flops:.4g}", f"{run.busy_s:.4g} s"
        print(f"  FLOPs      FLOPs a token * tokens = {per_token:.4g} * {tokens:.4g} = {total}")
        if busy_s is None:
            print(f"  busy       FLOPs / (n*C*MFU) = {total} / ({num_chips:,} * {peak} * {run.mfu:g}) = {busy}")
        else:
            step = f"{tokens:.4g} / {tokens_per_step:,} * {si(step_s, 's')}"
            print(f"  busy       tokens / (batch * seq_len) * step = {step} = {busy}")
            print(f"  MFU        FLOPs / (n*C*busy) = {total} / ({num_chips:,} * {peak} * {busy}) = {run.mfu:.3g}")
        print(f"  seconds    busy / goodput = {busy} / {run.goodput:g} = {run.seconds:.4g} s")
        print(f"  chip-hours n * seconds / 3600 = {num_chips:,} * {run.seconds:.4g} / 3600 = {run.chip_hours:.4g}")


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
    about = "slice, as in tpu7x:4x4x4: the step is predicted, with --mesh and so on; default: a recipe's"
    group.add_argument("--topology", help=about)
    group.add_argument("--num_slices", type=int, help="slices of that topology [the recipe's, else 1]")
    parser.set_defaults(default_topology=None)
    group.add_argument("--chip", help=f"kind of chip: {', '.join(CHIPS)} ['tpu7x']")
    group.add_argument("--chips", type=int, metavar="N", help="chips of the run; default: as many as --days asks for")
    group.add_argument("--days", type=float, help="find the chips that finish in so many days")
    group.add_argument("--mfu", type=float, metavar="SHARE", help="share of the peak, as in 0.4: assumed or measured")
    group.add_argument("--step_s", type=float, metavar="S", help="seconds of a step, in place of an MFU")
    about = "share of the time whose steps count [%(default)s]"
    group.add_argument("--goodput", type=float, default=1.0, metavar="SHARE", help=about)
    about = "type of the matmuls at that peak: bf16, fp8 or int8 [%(default)s]"
    group.add_argument("--matmul_dtype", default="bf16", metavar="DTYPE", help=about)
    group.add_argument("--price", type=float, help="price of a chip-hour, in any currency; default: none, and no cost")
    group.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    group.add_argument("--json", action="store_true", help="a JSON object, in FLOPs, bytes, seconds, days, hours")
