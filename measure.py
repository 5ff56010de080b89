"""
How things are measured here: pairs in one process, ratios, and what has to stand beside a speed.

Every method decodes a prompt before the next prompt begins, so whatever slows the machine for a
while slows all. A speed-up is the median over prompts of (seconds of plain decoding / seconds of
the method), without the prompt's own forward. Tokens per step = (new tokens - 1) / steps.
"""
import math
import statistics
import sys
import time
from collections import Counter
from itertools import product

import torch

from model import KVCache, Sampler
from tree import Tree, draft, generate
from vocabtrim import expected_tokens, mbsu, trim_for

NEAR_TIE = 1e-3  # two scores closer than this may change places in float32; rows differ by far less


def repetition(ids, n=8):
    """The share of n-grams of a text that stood in it before."""
    grams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.inference_mode()
def tie_gap(model, prompt, one, other, choose):
    """None if two texts are equal, else how far apart the base model's noisy scores of the two ids
    lie at the first difference: in float32 a row among others may differ in its last bits from the
    row alone."""
    if one == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
    if at is None:
        return float("inf")  # one text is a part of the other: no tie explains that
    context = torch.tensor([prompt + one[:at]], device=model.wte.weight.device)
    choose.start(len(prompt), model.config.vocab_size)
    logits = model.lm_head(model(context)[:, -1])
    scores = choose.scores(logits, [context.shape[1]])[0]
    gap = abs(float(scores[one[at]] - scores[other[at]]))
    if gap == float("inf") and choose.top_p < 1:  # one was filtered: how near the edge was it?
        law = Sampler(choose.temperature, choose.top_k).law(logits)
        gap = min(abs(float(law[0][law[0] > law[0, i]].sum()) - choose.top_p)
                  for i in (one[at], other[at]))
    return gap


# pairs of runs


def measure(model, tokenizer, prompts, methods, limit, choose, blind=False):
    """methods: {name: (drafter, tree)} -> {name: list of results, one a prompt}, the methods
    interleaved prompt by prompt. blind: each result also tells the steps that drafts ranked
    without the noise would take."""
    for drafter, tree in methods.values():  # warm up
        generate(model, prompts[0], drafter, tree, 32)
    results = {name: [] for name in methods}
    for i, prompt in enumerate(prompts):
        for name, (drafter, tree) in methods.items():
            call = model, prompt, drafter, tree, limit, tokenizer.stop
            result = generate(*call, choose=choose)
            result["blind"] = generate(*call, choose=choose, noise=False)["steps"] if (
                blind and choose.temperature and drafter) else result["steps"]
            results[name].append(result)
        if sys.stderr.isatty() or i % 10 == 9:
            print(f"temperature {choose.temperature}: prompt {i + 1} of {len(prompts)}",
                  end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)
    return results


def quartiles(slow, fast):
    """Of the paired ratios of seconds, prompt by prompt."""
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(slow, fast) if b["steps"]]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def lengths(runs):
    """How often a step accepted 0, 1, 2, ... drafts -> counts; and how often a node at depth
    1, 2, ... was right where its parent was -> shares."""
    counts = Counter(n - 1 for run in runs for n in run["accepted"])
    reached = [sum(counts[m] for m in counts if m >= d) for d in range(max(counts) + 1)]
    return ([counts[d] for d in range(len(reached))],
            [after / before for before, after in zip(reached, reached[1:])])


def summary(model, prompts, plain, runs, drafter, tree, choose):
    """What the JSON says of one method."""
    ties = [gap for prompt, a, b in zip(prompts, plain, runs)
            if (gap := tie_gap(model, prompt, a["ids"], b["ids"], choose)) is not None]
    tokens, steps = sum(sum(r["accepted"]) for r in runs), sum(r["steps"] for r in runs)
    (low, middle, high), (counts, shares) = quartiles(plain, runs), lengths(runs)
    return {"tokens_per_step": tokens / steps,
            "tokens_per_step_blind": tokens / sum(r["blind"] for r in runs),
            "accepted_drafts": counts, "accepted_by_depth": shares,
            "tokens_per_s": tokens / sum(r["seconds"] for r in runs),
            "prompt_ms": 1e3 * statistics.median(r["prompt_seconds"] for r in runs),
            "step_ms": 1e3 * sum(r["seconds"] for r in runs) / steps,
            "speedup": middle, "speedup_quartiles": [low, high],
            "identical": all(gap < NEAR_TIE for gap in ties),
            "near_ties": sum(gap < NEAR_TIE for gap in ties), "tree_nodes": tree.size,
            "mbsu": mbsu(tokens / steps, drafter, tree.max_depth) if hasattr(
                drafter, "base") else tokens / steps,
            "trim": 0 if getattr(drafter, "keep", None) is None else len(drafter.keep)}


# the size that pays


def step_cost(model, drafter, counted, prompts, choose, sizes=(1, 2, 4, 6, 8, 12, 16, 24)):
    """{N: seconds of a step with N nodes, drafting included}, medians, the sizes interleaved."""
    sizes = [n for n in sizes if n <= len(counted) + 1]
    trees = [Tree([path for path, _ in counted[:n - 1]], model.wte.weight.device) for n in sizes]
    seconds = {n: [] for n in sizes}
    for prompt in prompts:
        for n, tree in zip(sizes, trees):
            run = generate(model, prompt, drafter, tree, 24, choose=choose)
            seconds[n].append(run["seconds"] / run["steps"])
    return {n: statistics.median(s) for n, s in seconds.items()}


def best_size(counted, total, cost, most=math.inf):
    """The number of nodes, `most` or fewer, that gives the most tokens per second -> (it, why)."""
    tokens = {n: expected_tokens(counted, total, n) for n in cost if n <= most}
    n = max(tokens, key=lambda n: tokens[n] / cost[n])
    return n, (f"{n} node{'s' * (n > 1)}: {tokens[n]:.2f} tokens a step at "
               f"{cost[n] / cost[1]:.2f}x the time of a plain step")


def fastest(model, drafter, counted, ways, prompts, choose, margin=0.95):
    """A trial: of `ways` = [(kept ids or 0, nodes, ...), ...], the first being plain decoding, the
    one with the best median of paired ratios. Kept ids have to pay clearly: the fewer tokens a
    step are certain, the time is measured."""
    seconds = {way: [] for way in ways}
    for prompt, way in product(prompts, ways):
        trim_for(drafter, way[0], choose.temperature)
        tree = Tree([path for path, _ in counted[:way[1] - 1]], model.wte.weight.device)
        seconds[way].append(generate(model, prompt, drafter, tree, 48, choose=choose)["seconds"])
    return max(ways, key=lambda way: (margin if way[0] else 1) * statistics.median(
        plain / own for plain, own in zip(seconds[ways[0]], seconds[way])))


# where the time goes


def settle():  # a GPU works on after a call has returned
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timed:
    """Stands for an object and adds up the seconds of its calls, or of these methods', in
    `seconds[name]`."""

    def __init__(self, inner, name, seconds, *methods):
        self.__dict__.update(inner=inner, name=name, seconds=seconds, methods=methods)

    def __getattr__(self, key):
        value = getattr(self.inner, key)
        return Timed(value, self.name, self.seconds) if key in self.methods else value

    def __call__(self, *args, **kwargs):
        settle()
        begin = time.perf_counter()
        result = self.inner(*args, **kwargs)
        settle()
        self.seconds[self.name] += time.perf_counter() - begin
        return result


def split(model, prompts, drafter, tree, limit, choose):
    """Milliseconds a step: the base model, drafting (what heads compute), all else (the noise, the
    sorting and picking of guesses, the walk, the cache)."""
    seconds, total, whole, steps = Counter(), Counter(), 0.0, 0
    timed = Timed(model, "base", seconds, "lm_head")
    drafting = drafter and Timed(drafter, "draft", seconds, "start", "extend", "logits")
    for prompt in prompts:
        came = []

        def note(new):
            if not came:  # until now it was the prompt's own forward, which is no step
                seconds.clear()
            came.append(new)
        run = generate(timed, prompt, drafting, tree, limit, show=note, choose=choose)
        total.update(seconds)
        whole, steps = whole + run["seconds"], steps + run["steps"]
    parts = {name: 1e3 * total[name] / steps for name in ("base", "draft")}
    return {**parts, "rest": 1e3 * whole / steps - sum(parts.values())}


@torch.inference_mode()
def draft_seconds(drafter, tree, choose, repeats=30):
    """Median seconds of drafting alone, a whole tree."""
    model, seconds = drafter.base, []
    h, tokens = model.wte.weight[:4], torch.arange(4, device=model.wte.weight.device)
    choose.start(0, model.config.vocab_size)
    for _ in range(repeats):
        begin = time.perf_counter()
        draft(drafter, tree, drafter.start(h, tokens, 0), tokens[-1:], choose, 3)[1].tolist()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@torch.inference_mode()
def rows_cost(model, sizes, repeats=60):
    """{N: median seconds of a base-model call on N rows behind 128 kept ones}, interleaved."""
    device = model.wte.weight.device
    past = min(128, model.config.block_size // 2)
    cache = KVCache(model, past + max(sizes))
    cache.keep(range(past))
    seconds = {n: [] for n in sizes}
    rows = torch.zeros(1, max(sizes), dtype=torch.long, device=device)
    for _ in range(repeats):
        for n in sizes:
            positions = torch.full((n,), past, device=device)
            begin = time.perf_counter()
            model.lm_head(model(rows[:, :n], cache, positions)[0]).argmax(-1).tolist()
            seconds[n].append(time.perf_counter() - begin)
    return {n: statistics.median(s[5:]) for n, s in seconds.items()}


def roofline(model, megabytes=64, repeats=9):
    """-> (bytes of weights that a plain step reads, bytes a second that memory gives): no step can
    be shorter than their ratio, unless the weights stay in the processor's own cache."""
    table = 0 if model.config.tied else model.wte.weight.numel()  # one row of it is read
    weights = 4 * (sum(p.numel() for p in model.parameters()) - table)
    here = torch.ones(megabytes * 2**18, device=model.wte.weight.device)
    there, seconds = torch.empty_like(here), []
    for _ in range(repeats):
        settle()
        begin = time.perf_counter()
        there.copy_(here)
        settle()
        seconds.append(time.perf_counter() - begin)
    return weights, 2 * 4 * here.numel() / min(seconds)  # a copy reads and writes


@torch.inference_mode()
def cached_loop(model, prompt, limit, stop=None):
    """Greedy decoding with a cache as anyone would write it, the yardstick for the loop in tree.py
    -> its ids, and the seconds after the prompt's own forward."""
    device, ids = model.wte.weight.device, []
    cache, fed = KVCache(model, len(prompt) + limit), torch.tensor([prompt], device=device)
    while len(ids) < limit and (not ids or ids[-1] != stop):
        h = model(fed, cache)
        cache.keep(range(fed.shape[1]))
        fed = model.lm_head(h[:, -1:]).argmax(-1)
        ids.append(fed.item())
        if len(ids) == 1:
            begin = time.perf_counter()
    return ids, time.perf_counter() - begin


def compile_forward(model):
    """Let torch.compile make the model's forward, or say in one sentence why it can't."""
    eager = model.forward
    try:
        model.forward = torch.compile(eager)
        with torch.inference_mode():
            model(torch.zeros(1, 2, dtype=torch.long, device=model.wte.weight.device))
    except Exception as error:  # no compiler, no headers, a processor it doesn't know, ...
        model.forward = eager
        print(f"--compile: torch.compile doesn't work here ({type(error).__name__}), going on "
              "without it", file=sys.stderr)


# for people


def show(title, table, columns):
    """columns: {heading: field of the rows}; speed, quartiles and the check come last."""
    width = {heading: max(9, len(heading) + 2) for heading in columns}
    print(f"\n{title}\n{'':16}" + "".join(f"{h:>{w}}" for h, w in width.items())
          + "    speed  quartiles   identical")

    def cell(value):
        return "-" if value is None else f"{value}" if isinstance(value, int) else f"{value:.2f}"
    for name, row in table.items():
        print(f"{name:16}" + "".join(f"{cell(row[field]):>{width[h]}}"
                                     for h, field in columns.items()), end="")
        low, high = row["speedup_quartiles"]
        print(f"{row['speedup']:9.2f}  {low:.2f}..{high:.2f}  {str(row['identical']).lower()}"
              + (f", {row['near_ties']} near-ties" if row["near_ties"] else ""), flush=True)


def bars(table):
    """Speed as bars; | marks plain decoding."""
    for name, row in table.items():
        bar = f"{'#' * round(20 * row['speedup']):<20}"
        print(f"{name:16} {bar[:20]}|{bar[20:]} {row['speedup']:.2f}")


def show_steps(table):
    """How many drafts a step accepts, how often each depth is right, where a step's time goes."""
    print(f"\n{'':16}  steps that accepted 0, 1, 2, ... drafts, %   right at depth 1, 2, ..., %"
          "   ms a step: base  draft   rest")
    for name, row in table.items():
        total = sum(row["accepted_drafts"])
        counts = " ".join(f"{100 * n / total:.0f}" for n in row["accepted_drafts"])
        shares = " ".join(f"{100 * share:.0f}" for share in row["accepted_by_depth"])
        print(f"{name:16}  {counts:42}   {shares:26}   {row['ms']['base']:15.2f} "
              f"{row['ms']['draft']:6.2f} {row['ms']['rest']:6.2f}", flush=True)


def plot(tables, path):
    """Speed and tokens per step of each method, a group of bars for each temperature."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, field in zip(figure.subplots(1, 2), ("speedup", "tokens_per_step")):
        for i, (temperature, table) in enumerate(tables.items()):
            places = [j + 0.27 * i for j in range(len(table))]
            axes.bar(places, [row[field] for row in table.values()], 0.25,
                     label=f"temperature {temperature}")
            axes.set_xticks([j + 0.27 for j in range(len(table))], table, rotation=40, ha="right")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(field.replace("_", " "))
        axes.margins(y=0.15)  # room for the legend
        axes.legend(loc="upper center", ncols=3)
    figure.savefig(path)
