"""
Measure: every method on the same held-out prompts, paired and interleaved in one process.

    python bench.py --quick

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

import torch

from hydra import KINDS, Parser, at_least, command, load_base, load_heads, make_tree, pick_device
from model import KVCache, Sampler, UserError
from tree import Lookup, generate
from vocabtrim import trim_for

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


def measure(model, tokenizer, prompts, methods, limit, choose):
    """-> {method: list of results, one a prompt}, the methods interleaved prompt by prompt. With a
    temperature, each result also tells the steps that drafts ranked without the noise would
    take."""
    for drafter, tree in methods.values():  # warm up
        generate(model, prompts[0], drafter, tree, 32)
    results = {name: [] for name in methods}
    for i, prompt in enumerate(prompts):
        for name, (drafter, tree) in methods.items():
            call = model, prompt, drafter, tree, limit, tokenizer.stop
            result = generate(*call, choose=choose)
            result["blind"] = generate(*call, choose=choose, noise=False)["steps"] if (
                choose.temperature and name.split()[0] in KINDS) else result["steps"]
            results[name].append(result)
        if sys.stderr.isatty():
            print(f"\rtemperature {choose.temperature}: prompt {i + 1} of {len(prompts)} ", end="",
                  file=sys.stderr)
    return results


def summary(model, prompts, plain, runs, drafter, tree, choose):
    """What the JSON says of one method."""
    gaps = [tie_gap(model, prompt, a["ids"], b["ids"], choose)
            for prompt, a, b in zip(prompts, plain, runs)]
    ties = [gap for gap in gaps if gap is not None]
    tokens = sum(sum(r["accepted"]) for r in runs)
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(plain, runs) if b["steps"]]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"tokens_per_step": tokens / sum(r["steps"] for r in runs),
            "tokens_per_step_blind": tokens / sum(r["blind"] for r in runs),
            "tokens_per_s": tokens / sum(r["seconds"] for r in runs),
            "speedup": middle, "speedup_quartiles": [low, high],
            "identical": all(gap < NEAR_TIE for gap in ties), 
            "near_ties": sum(gap < NEAR_TIE for gap in ties), "tree_nodes": tree.size,
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


def main():
    parser = Parser(description="Compare all methods on held-out prompts.")
    parser.add_argument("--out", default="out", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--quick", action="store_true", help="few prompts, short texts")
    parser.add_argument("--prompts", type=at_least(2), default=40, metavar="N")
    parser.add_argument("--tree", default="auto", help="as in hydra.py")
    parser.set_defaults(limit=128)
    if parser.parse_args().quick:
        parser.set_defaults(prompts=6, limit=48)
    args = parser.parse_args()
    device = pick_device(args.device)
    model, tokenizer, prompts = load_base(args.out, device)
    prompts = prompts[:args.prompts]
    if len(prompts) < 2:
        raise UserError("the held-out text was too short for standard prompts: train on more text")
    drafters = {"none": None, "lookup": Lookup(model.config.vocab_size)}
    for kind in KINDS:
        for name in (kind, f"{kind} trim"):
            drafters[name] = load_heads(args.out, kind, model, tokenizer, device)
            trim_for(drafters[name], model.config.vocab_size // 8 if "trim" in name else 0, 0)
    tables = {}
    for temperature in (0.0, 0.8, 1.0):
        choose = Sampler(temperature)
        methods = {name: (drafter, make_tree(args.tree, drafter, temperature, device))
                   for name, drafter in drafters.items()}
        results = measure(model, tokenizer, prompts, methods, args.limit, choose)
        seen = statistics.mean(repetition(r["ids"]) for r in results["none"])
        tables[temperature] = {
            name: summary(model, prompts, results["none"], runs, *methods[name], choose)
            for name, runs in results.items()}
        show(temperature, tables[temperature], seen, len(prompts))
    cost = step_cost(model, [1, 2, 4, 8, 16, 32, 64])
    print("a step on N rows: " + ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in cost.items()))
    print(json.dumps({
        "config": dataclasses.asdict(model.config), "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "step_cost": cost, "methods": tables.pop(0.0),
        "sampled": {str(temperature): table for temperature, table in tables.items()}}))


if __name__ == "__main__":
    command(main)
