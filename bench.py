"""
Measure: every method on the same held-out prompts, paired and interleaved in one process.

    python bench.py            # all methods, greedy and sampled
    python bench.py tree       # how many nodes pay, static and dynamic
    python bench.py trim       # how many ids pay, counted on which text
    python bench.py heads      # from Medusa to Hydra++, one ingredient at a time

Speed is compared prompt by prompt: every method decodes a prompt before the next prompt begins, so
that whatever slows the machine for a while slows all of them. A speed-up is the median over prompts
of (seconds of plain decoding / seconds of the method), shown with its quartiles. The prompt's own
forward isn't counted. Steps are counted as everywhere: tokens per step = (new tokens - 1) / steps.
"""
import dataclasses
import json
import platform
import statistics
import sys
import time
from itertools import product
from pathlib import Path

import torch

from hydra import (KINDS, Parser, command, counted_at, load_base, load_heads, make_tree, number,
                   pick_device)
from medusa import Lookup
from model import KVCache, Sampler, UserError
from tree import Dynamic, generate
from vocabtrim import mbsu, trim_for

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
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    if at >= min(len(one), len(other)):
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


@torch.inference_mode()
def step_cost(model, sizes, repeats=60):
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
        if sys.stderr.isatty():
            print(f"\rtemperature {choose.temperature}: prompt {i + 1} of {len(prompts)} ", end="",
                  file=sys.stderr)
    return results


def quartiles(slow, fast):
    """Of the paired ratios of seconds, prompt by prompt."""
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(slow, fast) if b["steps"]]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def summary(model, prompts, plain, runs, drafter, tree, choose):
    """What the JSON says of one method."""
    gaps = [tie_gap(model, prompt, a["ids"], b["ids"], choose)
            for prompt, a, b in zip(prompts, plain, runs)]
    ties = [gap for gap in gaps if gap is not None]
    tokens, steps = sum(sum(r["accepted"]) for r in runs), sum(r["steps"] for r in runs)
    low, middle, high = quartiles(plain, runs)
    return {"tokens_per_step": tokens / steps,
            "tokens_per_step_blind": tokens / sum(r["blind"] for r in runs),
            "tokens_per_s": tokens / sum(r["seconds"] for r in runs),
            "speedup": middle, "speedup_quartiles": [low, high],
            "identical": all(gap < NEAR_TIE for gap in ties),
            "near_ties": sum(gap < NEAR_TIE for gap in ties), "tree_nodes": tree.size,
            "mbsu": mbsu(tokens / steps, drafter, tree.max_depth) if drafter else tokens / steps,
            "trim": 0 if getattr(drafter, "keep", None) is None else len(drafter.keep)}


def show(temperature, table, seen, count):
    print(f"\ntemperature {temperature}, {count} prompts; {seen:.0%} of the text's 8-grams "
          "stood in it before")
    print(f"{'':13}{'nodes':>6}{'tokens/step':>12}{'without noise':>14}{'tokens/s':>10}"
          f"{'speed':>7}  quartiles   identical")
    for name, row in table.items():
        low, high = row["speedup_quartiles"]
        print(f"{name:13}{row['tree_nodes']:6}{row['tokens_per_step']:12.2f}"
              f"{row['tokens_per_step_blind']:14.2f}{row['tokens_per_s']:10.0f}"
              f"{row['speedup']:7.2f}  {low:.2f}..{high:.2f}  {str(row['identical']).lower()}"
              + (f", {row['near_ties']} near-ties" if row["near_ties"] else ""))


def compare(model, tokenizer, prompts, args):
    """Every method at every temperature -> the JSON object."""
    drafters = {"none": None, "lookup": Lookup(model.config.vocab_size)}
    for kind in there(args.out):
        for name in (kind, f"{kind} trim"):
            drafters[name] = load_heads(args.out, kind, model, tokenizer, args.device)
    tables = {}
    for temperature in (0.0, 0.8, 1.0):
        choose, methods = Sampler(temperature), {}
        for name, drafter in drafters.items():
            if name.split()[0] in KINDS:
                trim_for(drafter, model.config.vocab_size // 8 * ("trim" in name), temperature)
            methods[name] = drafter, make_tree(args.tree, drafter, temperature, args.device)
        results = measure(model, tokenizer, prompts, methods, args.limit, choose, blind=True)
        seen = statistics.mean(repetition(r["ids"]) for r in results["none"])
        tables[temperature] = {
            name: summary(model, prompts, results["none"], runs, *methods[name], choose)
            for name, runs in results.items()}
        show(temperature, tables[temperature], seen, len(prompts))
    cost = step_cost(model, [1, 2, 4, 8, 16, 32, 64])
    print("a step on N rows: " + ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in cost.items()))
    return {"config": dataclasses.asdict(model.config), "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "step_cost": cost, "methods": tables.pop(0.0),
            "sampled": {str(temperature): table for temperature, table in tables.items()}}


def there(out):
    """The kinds of heads that a folder holds."""
    return [kind for kind in KINDS if (Path(out) / f"{kind}.pt").exists()]


def sweep_tree(model, tokenizer, prompts, args):
    """The number of nodes: expected and measured tokens per step, cost of a step, speed; and how
    the size that `auto` took compares with the best of the sweep."""
    tables = {}
    for kind, temperature in product(there(args.out), (0.0, 0.8)):
        drafter = load_heads(args.out, kind, model, tokenizer, args.device)
        trim_for(drafter, "auto", temperature)
        counted, methods = counted_at(drafter, temperature), {}
        auto, dynamic = str(counted["auto"] + 1), {f"dynamic {n}": n for n in (8, 16)}
        for name in dict.fromkeys(["1", "2", "4", "6", "8", "12", "16", "24", "32", auto, "chain",
                                   *dynamic]):
            tree = (Dynamic(dynamic[name], drafter.max_depth) if name in dynamic else
                    make_tree(name, drafter, temperature, args.device))
            methods[name] = drafter, tree
        choose = Sampler(temperature)
        results = measure(model, tokenizer, prompts, methods, args.limit, choose)
        print(f"\n{kind} at temperature {temperature}, {len(prompts)} prompts, drafts of "
              f"{len(drafter.keep) if drafter.keep is not None else 'all'} ids; auto: "
              f"{counted['why']}\n{'nodes':12}{'expected':>9}{'measured':>9}{'step, ms':>9}"
              f"{'cost':>6}{'speed':>7}  quartiles   identical")
        table = tables.setdefault(kind, {})[str(temperature)] = {}
        for name, runs in results.items():
            row = summary(model, prompts, results["1"], runs, *methods[name], choose)
            row["step"] = sum(r["seconds"] for r in runs) / sum(r["steps"] for r in runs)
            shares = zip(counted["paths"], counted["counts"])
            row["expected"] = 1 + sum(
                count for path, count in shares
                if tuple(path) in methods[name][1].paths) / counted["total"]
            table[name] = row
            low, high = row["speedup_quartiles"]
            expected = f"{row['expected']:9.2f}" if name not in dynamic else " " * 9
            print(f"{name:12}{expected}{row['tokens_per_step']:9.2f}{row['step'] * 1e3:9.2f}"
                  f"{row['step'] / table['1']['step']:6.2f}{row['speedup']:7.2f}  "
                  f"{low:.2f}..{high:.2f}  {str(row['identical']).lower()}")
        best = max((n for n in table if n.isdecimal()), key=lambda n: table[n]["speedup"])
        low, middle, high = quartiles(results[best], results[auto])
        print(f"auto ({auto} nodes) against the best of the sweep ({best}): {middle:.2f} "
              f"({low:.2f}..{high:.2f})", flush=True)
    return tables


COMMANDS = {"compare": compare, "tree": sweep_tree}


def main():
    parser = Parser(description="Compare all methods on held-out prompts.")
    parser.add_argument("what", nargs="?", default="compare", choices=COMMANDS)
    parser.add_argument("--out", default="out", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--quick", action="store_true", help="few prompts, short texts")
    parser.add_argument("--prompts", type=number(2), default=40, metavar="N")
    parser.add_argument("--tree", default="auto", help="as in hydra.py")
    parser.set_defaults(limit=128)
    if parser.parse_args().quick:
        parser.set_defaults(prompts=6, limit=48)
    args = parser.parse_args()
    args.device = pick_device(args.device)
    model, tokenizer, prompts = load_base(args.out, args.device)
    prompts = prompts[:args.prompts]
    if len(prompts) < 2:
        raise UserError("the held-out text was too short for standard prompts: train on more text")
    print(json.dumps(COMMANDS[args.what](model, tokenizer, prompts, args)))


if __name__ == "__main__":
    command(main)
