"""
Measure: every method on the same held-out prompts, paired and interleaved in one process.

    python bench.py            # all methods, greedy and sampled
    python bench.py tree       # how many nodes pay, static and dynamic
    python bench.py trim       # how many ids pay, counted on which text
    python bench.py heads      # from Medusa to Hydra++, one ingredient at a time

Every method decodes a prompt before the next prompt begins, so whatever slows the machine for a
while slows all. A speed-up is the median over prompts of (seconds of plain decoding / seconds of
the method), without the prompt's own forward. Tokens per step = (new tokens - 1) / steps.
"""
import argparse
import copy
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from hydra import (KINDS, Hydra, Parser, command, counted_at, fingerprint, load_base, load_heads,
                   make_tree, number, pick_device)
from medusa import Lookup, Medusa
from model import KVCache, Sampler, UserError, load_file, save_file
from train import Progress, hold_out, own_text, read_corpus, train_heads, windows
from tree import Dynamic, Tree, draft, generate, walk
from vocabtrim import (best_size, count_ids, count_paths, coverage, drafting_weights, mbsu,
                       most_frequent, step_cost, trim, trim_for, write_text)

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


def summary(model, prompts, plain, runs, drafter, tree, choose):
    """What the JSON says of one method."""
    ties = [gap for prompt, a, b in zip(prompts, plain, runs)
            if (gap := tie_gap(model, prompt, a["ids"], b["ids"], choose)) is not None]
    tokens, steps = sum(sum(r["accepted"]) for r in runs), sum(r["steps"] for r in runs)
    low, middle, high = quartiles(plain, runs)
    return {"tokens_per_step": tokens / steps,
            "tokens_per_step_blind": tokens / sum(r["blind"] for r in runs),
            "tokens_per_s": tokens / sum(r["seconds"] for r in runs),
            "step_ms": 1e3 * sum(r["seconds"] for r in runs) / steps,
            "speedup": middle, "speedup_quartiles": [low, high],
            "identical": all(gap < NEAR_TIE for gap in ties),
            "near_ties": sum(gap < NEAR_TIE for gap in ties), "tree_nodes": tree.size,
            "mbsu": mbsu(tokens / steps, drafter, tree.max_depth) if hasattr(
                drafter, "base") else tokens / steps,
            "trim": 0 if getattr(drafter, "keep", None) is None else len(drafter.keep)}


def show(title, table, columns):
    """columns: {heading: field of the rows}; speed, quartiles and the check come last."""
    width = {heading: max(9, len(heading) + 2) for heading in columns}
    print(f"\n{title}\n{'':16}" + "".join(f"{h:>{w}}" for h, w in width.items())
          + "    speed  quartiles   identical")
    for name, row in table.items():
        print(f"{name:16}" + "".join(
            f"{row[field]:{width[h]}{'' if isinstance(row[field], int) else '.2f'}}"
            for h, field in columns.items()), end="")
        low, high = row["speedup_quartiles"]
        print(f"{row['speedup']:9.2f}  {low:.2f}..{high:.2f}  {str(row['identical']).lower()}"
              + (f", {row['near_ties']} near-ties" if row["near_ties"] else ""), flush=True)


def compare(model, tokenizer, prompts, args):
    """Every method at every temperature -> the JSON object."""
    drafters = {"none": None, "lookup": Lookup(model.config.vocab_size)}
    for kind in kinds_in(args.out):
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
        show(f"temperature {temperature}, {len(prompts)} prompts; {seen:.0%} of the text's 8-grams "
             "stood in it before", tables[temperature], {
                 "nodes": "tree_nodes", "tokens/step": "tokens_per_step", "MBSU": "mbsu",
                 "without noise": "tokens_per_step_blind", "tokens/s": "tokens_per_s"})
    cost = rows_cost(model, [1, 2, 4, 8, 16, 32, 64])
    print("a step on N rows: " + ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in cost.items()))
    return {"config": asdict(model.config), "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "step_cost": cost, "methods": tables.pop(0.0),
            "sampled": {str(temperature): table for temperature, table in tables.items()}}


def kinds_in(out):
    return [kind for kind in KINDS if (Path(out) / f"{kind}.pt").exists()]


def sweep_tree(model, tokenizer, prompts, args):
    """The number of nodes: expected and measured tokens per step, cost of a step, speed; and how
    the size that `auto` took compares with the best of the sweep."""
    tables = {}
    for kind, temperature in product(kinds_in(args.out), (0.0, 0.8)):
        drafter, methods = load_heads(args.out, kind, model, tokenizer, args.device), {}
        trim_for(drafter, "auto", temperature)
        counted = counted_at(drafter, temperature)
        auto, dynamic = str(counted["auto"] + 1), {f"dynamic {n}": n for n in (8, 16)}
        for name in dict.fromkeys(["1", "2", "4", "6", "8", "12", "16", "24", "32", auto, "chain",
                                   *dynamic]):
            methods[name] = drafter, Dynamic(dynamic[name], drafter.max_depth) if (
                name in dynamic) else make_tree(name, drafter, temperature, args.device)
        choose, table = Sampler(temperature), {}
        results = measure(model, tokenizer, prompts, methods, args.limit, choose)
        for name, runs in results.items():
            row = summary(model, prompts, results["1"], runs, *methods[name], choose)
            row["expected"] = 1 + sum(
                count for path, count in zip(counted["paths"], counted["counts"])
                if tuple(path) in methods[name][1].paths) / counted["total"]
            table[name] = row | {"cost": row["step_ms"] / table.get("1", row)["step_ms"]}
        ids = "all" if drafter.keep is None else len(drafter.keep)
        show(f"{kind} at temperature {temperature}, {len(prompts)} prompts, drafts of {ids} ids; "
             f"auto: {counted['why']}", table, {"expected": "expected", "cost": "cost",
                                                "measured": "tokens_per_step", "ms": "step_ms"})
        tables.setdefault(kind, {})[str(temperature)] = table
        best = max((n for n in table if n.isdecimal()), key=lambda n: table[n]["speedup"])
        low, middle, high = quartiles(results[best], results[auto])
        print(f"auto ({auto} nodes) against the best of the sweep ({best}): {middle:.2f} "
              f"({low:.2f}..{high:.2f})", flush=True)
    return tables


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


def kept_by_source(drafter, prompts, choose, k, args):
    """{source: the k ids most frequent there}: the base model's own text, the text it was trained
    on, and what these heads, untrimmed, draft after prompts that aren't measured."""
    drafted, tree = [], make_tree("16", drafter, choose.temperature, args.device)

    def watch(tree, tokens, choice, *rest):
        drafted.extend(tokens[1:])
        return walk(tree, tokens, choice, *rest)
    for prompt in prompts:
        generate(drafter.base, prompt, drafter, tree, args.limit, choose=choose, accept=watch)
    counts = {"generated": drafter.counts[choose.temperature],
              "corpus": load_file(Path(args.out) / "base.pt")["counts"],
              "drafted": count_ids(torch.tensor(drafted), drafter.vocab_size)}
    return {source: most_frequent(c, k).to(args.device) for source, c in counts.items()}


def sweep_trim(model, tokenizer, prompts, args):
    """The number of kept ids, with and without lucky ones, and the text they are counted on."""
    tables, half, V = {}, len(prompts) // 2, len(model.wte.weight)
    for kind, temperature in product(kinds_in(args.out)[-1:], (0.0, 0.8, 1.0)):
        drafter = load_heads(args.out, kind, model, tokenizer, args.device)
        tree = make_tree(args.tree, drafter, temperature, args.device)
        counts, choose = drafter.counts[temperature], Sampler(temperature)
        ways, methods, table = {"all": (None, 0)}, {"none": (None, Tree())}, {}
        for k in (V // 64, V // 32, V // 16, V // 8, V // 4, V // 2):
            keep = most_frequent(counts, k).to(args.device)
            for lucky in (0, k // 4) if temperature else (0,):
                ways[f"{k} + {lucky}" if lucky else f"{k}"] = keep, lucky
        for source, keep in kept_by_source(drafter, prompts[half:], choose, V // 8, args).items():
            ways[f"{source} {V // 8}"] = keep, V // 32 if temperature else 0
        for name, (keep, lucky) in ways.items():
            methods[name] = copy.copy(drafter), tree
            trim(methods[name][0], keep, lucky)
        results = measure(model, tokenizer, prompts[:half], methods, args.limit, choose)
        for name in ways:
            heads, runs = methods[name][0], results[name]
            table[name] = summary(model, prompts, results["none"], runs, heads, tree, choose) | {
                "coverage": 1.0 if heads.keep is None else coverage(counts, heads.keep.cpu()),
                "megabytes": 4e-6 * drafting_weights(heads, tree.max_depth),
                "draft_ms": 1e3 * draft_seconds(heads, tree, choose),
                "of_all": quartiles(results["all"], runs)[1]}
        show(f"{kind} at temperature {temperature}, {half} prompts, {tree.size} nodes", table, {
            "coverage": "coverage", "tokens/step": "tokens_per_step", "MB read": "megabytes",
            "MBSU": "mbsu", "draft, ms": "draft_ms", "step, ms": "step_ms", "of all": "of_all"})
        tables[str(temperature)] = table
        by_mbsu, by_clock = (max(table, key=lambda n: table[n][key]) for key in ("mbsu", "of_all"))
        print(f"most by MBSU: {by_mbsu} ({table[by_mbsu]['mbsu'] / table['all']['mbsu'] - 1:+.0%} "
              f"predicted, {table[by_mbsu]['of_all'] - 1:+.0%} measured); fastest by the clock: "
              f"{by_clock} ({table[by_clock]['of_all'] - 1:+.0%})", flush=True)
    return tables


TEACHER = {"objective": "teacher"}
ROWS = {"medusa": (Medusa, {}), "hydra": (Hydra, {}), "+ teacher": (Hydra, TEACHER),
        "+ 4 blocks": (Hydra, TEACHER | {"n_block": 4}),
        "+ prefix, hydra++": (Hydra, TEACHER | {"n_block": 4, "prefix": True}),
        "+ own LM heads": (Hydra, TEACHER | {"n_block": 4, "prefix": True, "own_lm_head": True})}


class Steps(Progress):  # by their number, not by the clock
    count = -1

    def done(self):
        self.count += 1
        return min(1.0, self.count / self.seconds)


def sweep_heads(model, tokenizer, prompts, args):
    """From Medusa to Hydra++, each row trained for the same time and for the same tokens. What is
    done stays in out/ablation.pt."""
    path, seconds, steps = Path(args.out) / "ablation.pt", *((4, 30) if args.quick else (100, 500))
    rows, bound = load_file(path) if path.exists() else {}, fingerprint(model)
    ids = tokenizer.encode_all(hold_out(read_corpus(args.data))[0])
    ids, T = torch.tensor(ids, device=args.device), model.config.block_size
    task = argparse.Namespace(seed=0, text_seconds=seconds / 2, text_rows=256, block_size=T,
                              heads_batch=2, heads_lr=2e-3)
    text = [x.flatten(0, 1) for x in own_text(model, ids[:len(ids) * 19 // 20], task)]
    begin = windows(ids[len(ids) * 19 // 20:], 32, T // 4, torch.Generator().manual_seed(3))
    counting = {t: write_text(model, begin, T // 2, t) for t in (0.0, 1.0)}
    for (name, (Heads, options)), same in product(ROWS.items(), ("time", "tokens")):
        key = f"{name:18} same {same}, {seconds if same == 'time' else steps}"
        if rows.get(key, {}).get("bound") != bound:
            heads = Heads(model, **options).to(args.device)
            train_heads(model, {"x": heads}, *text, task, Progress(key, seconds) if same == "time"
                        else Steps(key, steps))
            heads.eval().requires_grad_(False).ready()
            rows[key] = {"bound": bound} | measure_heads(heads, counting, prompts, tokenizer, args)
            save_file(path, rows)
        print(f"{key:36}" + "".join(f"{what} {value:.2f}  " for what, value in rows[key].items()
                                    if what != "bound"), flush=True)
    return rows


def measure_heads(heads, counting, prompts, tokenizer, args):
    """Tokens per step with 16 nodes, at temperatures 0 and 1; the size that pays at 0 and its
    speed; millions of weights that a draft pass reads; milliseconds of drafting."""
    row, model, depth = {}, heads.base, heads.max_depth
    for temperature, (tokens, h, noise) in counting.items():
        ranks = heads.ranks(h, tokens, noise)[:, model.config.block_size // 4 - 1:].flatten(0, 1)
        counted, choose = count_paths(ranks.tolist()), Sampler(temperature)
        nodes = best_size(counted, len(ranks), step_cost(model, heads, counted, prompts[:2],
                                                              choose))[0]
        methods = {n: (heads, Tree([p for p, _ in counted[:n - 1]], args.device))
                   for n in (1, 16, nodes)}
        runs = measure(model, tokenizer, prompts, methods, args.limit, choose)
        for n, what in ((16, "16 nodes"), (nodes, f"auto {nodes}")):
            got = summary(model, prompts, runs[1], runs[n], *methods[n], choose)
            what = f"T={temperature:.0f}, {what}"
            row |= {what: got["tokens_per_step"], what + ", speed": got["speedup"]}
    return row | {"M weights a pass": drafting_weights(heads, depth) / depth / 1e6,
                  "draft ms": 1e3 * draft_seconds(heads, methods[16][1], choose)}


COMMANDS = {"compare": compare, "tree": sweep_tree, "trim": sweep_trim, "heads": sweep_heads}


def main():
    parser = Parser(description="Compare all methods on held-out prompts.")
    parser.add_argument("what", nargs="?", default="compare", choices=COMMANDS)
    parser.add_argument("--out", default="out", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--quick", action="store_true", help="few prompts, short texts")
    parser.add_argument("--prompts", type=number(2), metavar="N", help="how many; default: 40, for "
                        "the sweeps 20, with --quick 6")
    parser.add_argument("--tree", default="auto", help="as in hydra.py")
    parser.add_argument("--data", help="for `heads`: what train.py was given")
    args = parser.parse_args()
    args.device, args.limit = pick_device(args.device), 48 if args.quick else 128
    args.prompts = args.prompts or (6 if args.quick else 40 if args.what == "compare" else 20)
    model, tokenizer, prompts = load_base(args.out, args.device)
    prompts = prompts[:args.prompts]
    if len(prompts) < (least := 4 if args.what == "trim" else 2):
        raise UserError(f"{len(prompts)} standard prompts are too few, {least} are needed: ask for "
                        "more, or train on more text")
    print(json.dumps(COMMANDS[args.what](model, tokenizer, prompts, args)))


if __name__ == "__main__":
    command(main)
