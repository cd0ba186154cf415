"""The cost of serving a model, by arithmetic: prefill, decoding, memory, how many chips help. No jax here.

    python roofline.py serve --preset=llama3.1-70b --topology=v5e:4x4 --context=8192 --dtype=int8 --explain
    python roofline.py serve --preset=deepseek-v3 --topology=tpu7x:2x2x1,tpu7x:2x2x2 --dtype=fp8 --plot=pareto.png

**Letters**, those of the scaling book (Austin et al. 2025, parts 7 and 8,
https://jax-ml.github.io/scaling-book/inference): n chips, each of C FLOP/s, W bytes/s of HBM and W_ici on both links of
an axis; a batch of B sequences.

**Prefill** processes all T tokens of a prompt at once, like training without a backward pass, and needs the logits of
the last token only. So it is bound by FLOPs. The share of the peak that it reaches (MFU) is assumed, not predicted:

    prefill_s   = max( FLOPs / (MFU * n*C),  weights / (n*W) )

**Decoding** makes one token of each sequence a step. Every weight is read once for the full batch, every cache for its
own sequence alone, and by each of the layers that share it:

    attention_s = max( B*cache / (n*W),  B*attention_FLOPs / (n*C) )
    linear_s    = max( weights(B) / (n*W),  B*2*P / (n*C) )               P: active matmul parameters
    step_s      = max( attention_s + linear_s,  messages_s )
    tokens/s    = B / step_s

The book leaves out attention's FLOPs. That is right for the G FLOPs a byte of grouped heads, wrong for latent
attention. There ("absorbed") all heads read one latent, at near 2*N FLOPs a byte. DeepSeek-V3 has 242 in bfloat16,
twice that from a cache in FP8; TPU7x has 313. A larger batch does not help against caches. Against weights it does:
FLOPs take longer than weights from the critical batch, for a dense model

    B_critical  = bytes of a weight / 2 * C/W                             240 on v5e in bfloat16; 313 on TPU7x

**Experts.** Of E experts a batch reads those that any of its tokens visits. If the router sends each token to X of them
at random (real routers are less even, and use fewer experts), that is

    distinct(B) = E * (1 - (1 - X/E)^B)

so the critical batch is about E/X times that of a dense model.

**Memory.** weights + B*cache <= n * HBM, evenly sharded. The activations of a step are small, and left out. The floor
of the latency is the weights alone, weights(1) / (n*W).

**How many chips.** Over n chips, a layer gathers its input and reduce-scatters its output twice, B*D numbers each time,
whatever n is. Its share of the weights shrinks. messages_s is the time of 2*L all-reduces. For a matmul D x F with w
bytes a weight and a bytes an activation, over M axes at once, messages take longer than loads and FLOPs from

    n > F/a * M * max( w / (B*beta),  2 / alpha )                         beta = W / W_ici, alpha = C / W_ici

The book's F / (B*beta) is for w = a, its F / alpha for a = 2. Both assume that every axis wraps around; one that does
not has half of W_ici. For a layer with experts, F is distinct(B) times the width of an expert where weights are loaded,
and X times it for FLOPs. Shared experts are added to both.

**Disaggregated serving**: prefill servers fill the caches of decode servers, each of n chips. All are busy if

    prefill : decode = prefill_s / (step_s * new tokens / B)

**Left out**: how queries arrive and differ in length; copies between servers; scales of quantized weights; elementwise
work; the all-to-alls of expert parallelism, and those that shard caches over more chips than there are key heads;
speculative decoding.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import anatomy
import command
import flags as flags_lib
from config import Config
from hardware import Axis, Chip, by, parse_topology, si
from predicted import transformer
from predicted.interconnect import collective_s

# The groups of Config's fields that describe a model.
MODEL_GROUPS = ("model", "mixture of experts", "multi-head latent attention")
STORED_BYTES = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5}  # of weights and caches, without their scales


# -- the load of the chips


def distinct_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """The expected number of experts that a batch of tokens visits, if each token takes some at random."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)


@dataclass(frozen=True)
class Load:
    """The bytes and FLOPs of a served model on all chips together. `load_of` makes it from a Config."""

    weight_bytes: float
    cache_bytes: float  # of one sequence
    flops_per_token: float  # 2*P: matmuls with weights
    attention_flops: float = 0.0  # of one new token with its cache
    lookup_bytes: float = 0.0  # of the weights of which a token reads one row: the embeddings
    expert_bytes: float = 0.0  # of the weights of the routed experts
    num_experts: int = 0
    experts_per_token: int = 0
    cache_reads: float = 1.0  # how often a step reads the cache: more than once if layers share keys and values

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < math.inf:  # NaN is not, either
                raise ValueError(f"{name}={value} must be 0 or more, and finite")

    def loaded_bytes(self, tokens: float) -> float:
        """The bytes of the weights that a step on a number of tokens reads."""
        experts = self.expert_bytes
        if self.num_experts:
            experts *= distinct_experts(self.num_experts, self.experts_per_token, tokens) / self.num_experts
        return self.weight_bytes - self.lookup_bytes - self.expert_bytes + experts

    def held_bytes(self, batch: int) -> float:
        return self.weight_bytes + batch * self.cache_bytes


def bytes_of(dtype: str) -> float:
    if dtype not in STORED_BYTES:
        raise ValueError(f"{dtype!r} is not one of {', '.join(STORED_BYTES)}")
    return STORED_BYTES[dtype]


def load_of(config: Config, context: int, *, weight_dtype: str = "bf16", cache_dtype: str = "bf16") -> Load:
    """Returns the load of a model with `context` tokens in the cache of every sequence."""
    if context < 1:
        raise ValueError(f"a context is 1 token or more, not {context}")
    size = bytes_of(weight_dtype)
    forward = transformer.forward_flops_per_token(config)
    routed = sum(w.params for w in transformer.weights(config).values() if w.share[1] > 1)
    dims = lambda kind: anatomy.key_dim(kind) + anatomy.value_dim(kind)
    if config.kv_lora_rank:  # absorbed
        dims = lambda kind: 2 * kind.kv_lora_rank + kind.rope_head_dim
    attended = transformer.attended_tokens(config, context)
    cache_bytes = partial(transformer.kv_cache_bytes, config, context, element_bytes=bytes_of(cache_dtype))
    embedded = anatomy.sizes(config)["A"] + (0 if config.tied_embeddings else anatomy.sizes(config)["D"])
    return Load(
        weight_bytes=size * transformer.num_params(config),
        cache_bytes=cache_bytes(),
        cache_reads=cache_bytes(read=True) / cache_bytes(),
        flops_per_token=sum(flops for part, flops in forward.items() if part not in ("scores", "mix")),
        attention_flops=sum(2.0 * kind.num_heads * dims(kind) * tokens for kind, tokens in attended),
        lookup_bytes=size * config.vocab_size * embedded,
        expert_bytes=size * routed,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
    )


# -- memory


def max_batch(load: Load, chip: Chip, num_chips: int) -> int:
    """The largest batch that fits. Raises ValueError if even the weights do not."""
    check_fit(load, chip, num_chips, 0)
    if not load.cache_bytes:
        raise ValueError("without a cache any batch fits")
    return int((num_chips * chip.hbm_bytes - load.weight_bytes) // load.cache_bytes)


def check_fit(load: Load, chip: Chip, num_chips: int, batch: int) -> None:
    """Raises ValueError if the chips' HBM is too small, with the bytes that are missing."""
    available, needed = num_chips * chip.hbm_bytes, load.held_bytes(batch)
    if needed > available:
        cache = f", {batch:,} caches {si(batch * load.cache_bytes, 'B')}" if batch else ""
        raise ValueError(
            f"does not fit: weights are {si(load.weight_bytes, 'B')}{cache}, the HBM of {num_chips:,} {chip.name} is "
            f"{si(available, 'B')}: short by {si(needed - available, 'B')}; from {least_chips(load, chip, batch):,} "
            "chips on it fits"
        )


def least_chips(load: Load, chip: Chip, batch: int) -> int:
    return math.ceil(load.held_bytes(batch) / chip.hbm_bytes)


# -- decoding


@dataclass(frozen=True)
class Step:
    """A decoding step, one token of each sequence. Each time is a lower bound by itself."""

    batch: int
    num_chips: int
    cache_s: float
    attention_flops_s: float
    weights_s: float
    flops_s: float
    messages_s: float

    @property
    def step_s(self) -> float:
        """The time of the step if messages overlap with all else."""
        attention_s, linear_s = max(self.cache_s, self.attention_flops_s), max(self.weights_s, self.flops_s)
        return max(attention_s + linear_s, self.messages_s)

    @property
    def sequential_s(self) -> float:
        """The time of the step if messages do not overlap."""
        return max(self.cache_s, self.attention_flops_s) + max(self.weights_s, self.flops_s) + self.messages_s

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def tokens_per_s_per_chip(self) -> float:
        return self.tokens_per_s / self.num_chips

    @property
    def bound(self) -> str:
        """The part that takes the most time; messages only if they take longer than all else together."""
        seconds = {"weights": self.weights_s, "FLOPs": self.flops_s, "cache": self.cache_s}
        seconds["attention"] = self.attention_flops_s
        return "messages" if self.messages_s == self.step_s else max(seconds, key=seconds.get)


def decode(
    load: Load, chip: Chip, num_chips: int, batch: int, *, matmul_dtype: str = "bf16", messages_s: float = 0.0
) -> Step:
    """Predicts a decoding step, whether or not it fits (`check_fit`)."""
    if batch < 1 or num_chips < 1:
        raise ValueError(f"a batch and a number of chips are 1 or more, not {batch} and {num_chips}")
    C, W = num_chips * chip.flops_per_s(matmul_dtype), num_chips * chip.hbm_bytes_per_s
    return Step(
        batch,
        num_chips,
        cache_s=batch * load.cache_bytes * load.cache_reads / W,
        attention_flops_s=batch * load.attention_flops / C,
        weights_s=load.loaded_bytes(batch) / W,
        flops_s=batch * load.flops_per_token / C,
        messages_s=messages_s,
    )


def floor_s(load: Load, chip: Chip, num_chips: int) -> float:
    """The least time of a step: that of the weights alone, at batch 1."""
    return load.loaded_bytes(1) / (num_chips * chip.hbm_bytes_per_s)


def critical_batch(load: Load, chip: Chip, *, matmul_dtype: str = "bf16") -> float:
    """The B at which FLOPs take as long as the weights: B * 2P/C = weights(B) / W. Caches have no such batch."""
    ridge = chip.flops_per_s(matmul_dtype) / chip.hbm_bytes_per_s
    excess = lambda batch: batch * load.flops_per_token - ridge * load.loaded_bytes(batch)
    high = 1.0  # the excess is convex, and below 0 without tokens: it has one root
    while excess(high) < 0:
        high *= 2
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return high


# -- sharding a model over chips


def messages_s(config: Config, axes: Sequence[Axis], batch: int, *, activation_bytes: float = 2) -> float:
    """The time of 2*L all-reduces of B*D numbers over all axes.

    Each is a reduce-scatter after one matmul and an all-gather before the next.
    """
    nbytes = batch * anatomy.sizes(config)["D"] * activation_bytes
    return 2 * config.num_layers * collective_s("all_reduce", nbytes, axes, spread=True)


def mlp_widths(config: Config, batch: int) -> tuple[float, float]:
    """Returns F of the weights that a layer's MLP loads for a batch, and F of those that a token uses."""
    size, E, X = anatomy.sizes(config), config.num_experts, config.experts_per_token
    if not E:
        return size["F"], size["F"]
    return size["M"] * distinct_experts(E, X, batch) + size["J"], size["M"] * X + size["J"]


def max_shards(
    widths: tuple[float, float],
    batch: int,
    chip: Chip,
    axes: Sequence[Axis],
    *,
    weight_bytes: float = 2,
    activation_bytes: float = 2,
    matmul_dtype: str = "bf16",
) -> float:
    """The number of chips from which a matmul's messages take longer than its weights and its FLOPs; see the top."""
    loaded, used = widths
    ici_bytes_per_s = sum(axis.link_bytes_per_s * (2 if axis.wrap else 1) for axis in axes if axis.size > 1)
    if not ici_bytes_per_s:  # one chip sends nothing
        return math.inf
    weights_s = weight_bytes * loaded / chip.hbm_bytes_per_s  # per element of the model dim, on one chip
    flops_s = batch * 2 * used / chip.flops_per_s(matmul_dtype)
    return max(weights_s, flops_s) / (batch * activation_bytes / ici_bytes_per_s)


# -- prefill and disaggregated serving


def prefill_flops(config: Config, tokens: int) -> float:
    """The FLOPs of a prompt's causal forward pass, with the logits of its last token alone."""
    forward = transformer.forward_flops_per_token(dataclasses.replace(config, seq_len=tokens))
    logits = forward.pop("unembedding")
    return tokens * sum(forward.values()) + logits


def prefill_s(
    flops: float, chip: Chip, num_chips: int, *, mfu: float, matmul_dtype: str = "bf16", loaded_bytes: float = 0.0
) -> float:
    """The time of one prompt at an assumed share of the peak, and at least that of loading its weights."""
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu={mfu}: a share of the peak is over 0 and at most 1")
    compute_s = flops / (mfu * num_chips * chip.flops_per_s(matmul_dtype))
    return max(compute_s, loaded_bytes / (num_chips * chip.hbm_bytes_per_s))


def prefill_servers(prefill_s: float, step: Step, new_tokens: int) -> float:
    """The number of prefill servers that keep one decode server of the same size full."""
    if new_tokens < 1:
        raise ValueError(f"a sequence gets 1 new token or more, not {new_tokens}")
    return prefill_s * step.batch / (step.step_s * new_tokens)


# -- latency against throughput


def batches_up_to(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... and the largest batch."""
    return sorted({largest, *(2**i for i in range(largest.bit_length()))}) if largest else []


def frontier(steps: Sequence[Step]) -> list[Step]:
    """Returns the Pareto-optimal steps in time and in tokens a chip."""
    best = []
    for step in sorted(steps, key=lambda step: (step.step_s, -step.tokens_per_s_per_chip)):
        if not best or step.tokens_per_s_per_chip > best[-1].tokens_per_s_per_chip:
            best.append(step)
    return best


# -- command line


def print_serve(args: argparse.Namespace) -> None:
    """Prints the figures of a served model on each slice, and marks the Pareto-optimal steps."""
    config = flags_lib.from_args(args)
    stored = dict(weight_dtype=args.weight_dtype or args.dtype_, cache_dtype=args.cache_dtype or args.dtype_)
    load, prompt = load_of(config, args.context, **stored), args.context - args.new_tokens
    if args.batch_ is not None and args.batch_ < 1:
        raise ValueError(f"--batch must be 1 or more, not {args.batch_}")
    if min(prompt, args.new_tokens) < 1:
        raise ValueError(f"--new_tokens={args.new_tokens} must leave a prompt: from 1 to {args.context - 1}")
    slices = [predict(topology, config, load, prompt, args) for topology in args.topology.split(",")]
    best = frontier([step for _, steps in slices for step in steps])
    names = ("step_s", "sequential_s", "tokens_per_s", "tokens_per_s_per_chip", "bound")
    for result, steps in slices:
        result["steps"] = [
            dataclasses.asdict(step) | {name: getattr(step, name) for name in names} | dict(on_frontier=step in best)
            for step in steps
        ]
    report = dict(kind="predicted", preset=config.preset, **stored, matmul_dtype=args.matmul_dtype)
    report |= dict(context_tokens=args.context, prompt_tokens=prompt, new_tokens=args.new_tokens)
    report |= dict(assumed_prefill_mfu=args.mfu, slices=[result for result, _ in slices])
    if args.plot:
        plot_frontier(report, args.plot)
    if args.json:
        return print(json.dumps(report))
    print(f"{config.preset}, {args.context:,} tokens in every cache, predicted")
    print(f"weights in {stored['weight_dtype']}, caches in {stored['cache_dtype']}, multiplied in {args.matmul_dtype}")
    for result, steps in slices:
        print_slice(result, args.mfu, prompt)
        if args.explain:
            explain(steps[-1], load, config, result["topology"], args.matmul_dtype)
    print("\n*: no other row is as quick with as many tokens a chip. In a step messages overlap with all else.")


def predict(topology: str, config: Config, load: Load, prompt: int, args) -> tuple[dict, list[Step]]:
    """Returns the figures of one slice, and its steps."""
    chip, shape = parse_topology(topology)
    axes, n, options = chip.axes(shape), math.prod(shape), dict(matmul_dtype=args.matmul_dtype)
    largest = max_batch(load, chip, n)
    check_fit(load, chip, n, args.batch_ or 1)
    batches = batches_up_to(largest) if args.batch_ is None else [args.batch_]
    steps = [decode(load, chip, n, B, messages_s=messages_s(config, axes, B), **options) for B in batches]
    last, flops, loaded = steps[-1], prefill_flops(config, prompt), load.loaded_bytes(prompt)
    prompt_s = prefill_s(flops, chip, n, mfu=args.mfu, loaded_bytes=loaded, **options)
    size = bytes_of(args.weight_dtype or args.dtype_)
    shards = max_shards(mlp_widths(config, last.batch), last.batch, chip, axes, weight_bytes=size, **options)
    result = dict(topology=topology, num_chips=n, hbm_bytes=n * chip.hbm_bytes, weight_bytes=load.weight_bytes)
    result |= dict(cache_bytes_per_sequence=load.cache_bytes, max_batch=largest, floor_s=floor_s(load, chip, n))
    result |= dict(critical_batch=critical_batch(load, chip, **options))
    result |= dict(max_cut_chips=shards if shards < math.inf else None)
    result |= dict(prefill_flops=flops, prefill_s=prompt_s)
    result["prefill_servers_per_decode_server"] = prefill_servers(prompt_s, last, args.new_tokens)
    return result, steps


def print_slice(result: dict, mfu: float, prompt: int) -> None:
    """Prints the figures of one slice, and its steps by batch."""
    n, shards, last = result["num_chips"], result["max_cut_chips"], f"{result['steps'][-1]['batch']:,}"
    weights, cache = si(result["weight_bytes"], "B"), si(result["cache_bytes_per_sequence"], "B")
    print(f"\n{result['topology']}, {n:,} chips, {si(result['hbm_bytes'], 'B')} of HBM")
    print(f"  memory    weights {weights}, a cache {cache}: at most {result['max_batch']:,} sequences")
    print(f"  floor     {si(result['floor_s'], 's')} a step, for the weights of one token alone")
    print(f"  critical  batch {result['critical_batch']:,.1f}: from there on FLOPs take longer than weights")
    print(f"  prefill   {si(result['prefill_s'], 's')} for {prompt:,} tokens, at an assumed {mfu:.0%} of the peak")
    print(f"  servers   {result['prefill_servers_per_decode_server']:.3g} for prefill to one that decodes {last}")
    if shards:
        print(f"  shards    from {shards:,.1f} chips on messages bind an MLP at batch {last}; these are {n:,}")
    print(f"  {'batch':>7}{'step, ms':>12}{'not overlapped':>16}{'tokens/s':>12}{'a chip':>10}{'a user':>10}  bound")
    for row in result["steps"]:
        numbers = f"{row['batch']:9,}{row['step_s'] * 1e3:12.3f}{row['sequential_s'] * 1e3:16.3f}"
        numbers += f"{row['tokens_per_s']:12,.1f}{row['tokens_per_s_per_chip']:10,.2f}{1 / row['step_s']:10,.1f}"
        print(f"{numbers}  {row['bound']}{' *' if row['on_frontier'] else ''}")


def explain(step: Step, load: Load, config: Config, topology: str, dtype: str) -> None:
    """Prints the formulas of a step with its numbers in them."""
    chip, shape = parse_topology(topology)
    n, B, C, W = step.num_chips, step.batch, si(chip.flops_per_s(dtype), "FLOP/s"), si(chip.hbm_bytes_per_s, "B/s")
    nbytes = load.cache_bytes * load.cache_reads, load.loaded_bytes(B), 2 * B * anatomy.sizes(config)["D"]
    cache, read, sent = (si(x, "B") for x in nbytes)
    scores, flops = si(load.attention_flops, "FLOP"), si(load.flops_per_token, "FLOP")
    print(f"  batch {B:,}")
    print(f"    cache      B * cache / (n*W) = {B} * {cache} / ({n} * {W}) = {si(step.cache_s, 's')}")
    print(f"    attention  B * FLOPs / (n*C) = {B} * {scores} / ({n} * {C}) = {si(step.attention_flops_s, 's')}")
    print(f"    weights    read / (n*W) = {read} / ({n} * {W}) = {si(step.weights_s, 's')}")
    if load.num_experts:
        E, X = load.num_experts, load.experts_per_token
        print(f"    experts    E * (1 - (1 - X/E)^B) = {E} * (1 - (1 - {X}/{E})^{B}) = ", end="")
        print(f"{distinct_experts(E, X, B):.4g} of a layer's experts are read")
    print(f"    FLOPs      B * 2*P / (n*C) = {B} * {flops} / ({n} * {C}) = {si(step.flops_s, 's')}")
    print(f"    messages   2*L all-reduces of B*D*2 bytes = 2 * {config.num_layers} of {sent} over {by(shape)}", end="")
    print(f" = {si(step.messages_s, 's')}")
    print(f"    step       max(max(cache, attention) + max(weights, FLOPs), messages) = {si(step.step_s, 's')}")


def plot_frontier(report: dict, path: str) -> None:
    """Draws tokens a chip against the time of a step: a line for each slice, a point for each batch."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ModuleNotFoundError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for result in report["slices"]:
        points = [(row["step_s"] * 1e3, row["tokens_per_s_per_chip"]) for row in result["steps"]]
        panel.plot(*zip(*points, strict=True), marker=".", label=result["topology"])
    title = f"{report['preset']}, {report['context_tokens']:,} tokens a cache, predicted"
    panel.set(title=title, xlabel="time of a step, ms", ylabel="tokens/s a chip", xscale="log", yscale="log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=120)


def add_serve_command(commands) -> None:
    about = "prefill, decoding, memory and servers of a model on slices"
    parser = commands.add_parser(
        "serve",
        help=about,
        description=about,
        allow_abbrev=False,
        usage="%(prog)s [--flag=value ...]",
        conflict_handler="resolve",  # --dtype is that of weights and caches, not Config's of a training step
    )
    parser.set_defaults(run=print_serve, parser=parser)
    flags_lib.add_flags(parser, MODEL_GROUPS)
    presets = ", ".join(flags_lib.PRESETS)
    parser.add_argument("--preset", default=argparse.SUPPRESS, help=f"model to start from ['tiny']: {presets}")
    group = parser.add_argument_group("serving")
    group.add_argument("--topology", default="tpu7x:2x2x1", help="slices, as in v5e:4x4,v5e:4x8 [%(default)s]")
    group.add_argument("--context", type=int, default=8192, help="tokens in the cache of a sequence [%(default)s]")
    group.add_argument(
        "--batch", type=int, dest="batch_", metavar="B", help="sequences; default: 1, 2, 4 to the most that fit"
    )
    stored = dict(dest="dtype_", default="bf16", metavar="DTYPE")
    group.add_argument("--dtype", **stored, help=f"type of weights and caches: {', '.join(STORED_BYTES)} [%(default)s]")
    group.add_argument("--weight_dtype", metavar="DTYPE", help="type of the weights, if another")
    group.add_argument("--cache_dtype", metavar="DTYPE", help="type of the caches, if another")
    group.add_argument("--matmul_dtype", default="bf16", metavar="DTYPE", help="bf16, fp8 or int8 [%(default)s]")
    group.add_argument("--new_tokens", type=int, default=512, help="tokens after the prompt [%(default)s]")
    about = "assumed share of the peak in prefill; the default is the scaling book's [%(default)s]"
    group.add_argument("--mfu", type=float, default=0.4, help=about)
    group.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    group.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
    group.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw latency against throughput; needs matplotlib"
    )
