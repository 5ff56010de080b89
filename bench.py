"""
Measure: every method on the same held-out prompts, paired and interleaved in one process.

    python bench.py            # all methods, greedy and sampled
    python bench.py tree       # how many nodes pay, static and dynamic
    python bench.py trim       # how many ids pay, counted on which text
    python bench.py heads      # from Medusa to Hydra++, one ingredient at a time

How is said in `measure.py`. The last line of each is one JSON object.
"""
import argparse
import copy
import importlib.util
import json
import platform
import statistics
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from hydra import (KINDS, Hydra, Parser, command, counted_at, fingerprint, load_base, load_heads,
                   make_tree, number, pick_device)
from measure import (bars, best_size, cached_loop, compile_forward, draft_seconds, measure, plot,
                     quartiles, repetition, roofline, rows_cost, show, show_steps, split, step_cost,
                     summary)
from medusa import Lookup, Medusa
from model import Sampler, UserError, load_file, save_file
from train import Progress, hold_out, own_text, read_corpus, train_heads, windows
from tree import Dynamic, Tree, generate, walk
from vocabtrim import (count_ids, count_steps, coverage, drafting_weights, most_frequent, trim,
                       trim_for, write_text)


def compare(model, tokenizer, prompts, args):
    """Every method at every temperature -> the JSON object."""
    drafters = {"none": None, "lookup": Lookup(model.config.vocab_size)}
    for kind in kinds_in(args.out):
        for name in (kind, f"{kind} trim"):
            drafters[name] = load_heads(args.out, kind, model, tokenizer, args.device)
    tables, repeated = {}, {}
    for temperature in (0.0, 0.8, 1.0):
        choose, methods = Sampler(temperature), {}
        for name, drafter in drafters.items():
            if name.split()[0] in KINDS:
                trim_for(drafter, model.config.vocab_size // 8 * ("trim" in name), temperature)
            methods[name] = drafter, make_tree(args.tree, drafter, temperature, args.device)
        results = measure(model, tokenizer, prompts, methods, args.limit, choose, blind=True)
        repeated[temperature] = statistics.mean(repetition(r["ids"]) for r in results["none"])
        tables[temperature] = table = {
            name: summary(model, prompts, results["none"], runs, *methods[name], choose) | {
                "ms": split(model, prompts[:4], *methods[name], args.limit, choose)}
            for name, runs in results.items()}
        show(f"temperature {temperature}, {len(prompts)} prompts; {repeated[temperature]:.0%} of "
             "the text's 8-grams stood in it before", table, {
                 "nodes": "tree_nodes", "tokens/step": "tokens_per_step", "MBSU": "mbsu",
                 "without noise": "tokens_per_step_blind", "tokens/s": "tokens_per_s"})
        show_steps(table)
    print("\nspeed at temperature 0, plain decoding = 1")
    bars(tables[0.0])
    if args.plot:
        plot(tables, args.plot)
    return {"config": asdict(model.config), "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            **machine(model, tokenizer, prompts, args), "methods": tables.pop(0.0),
            "sampled": {str(temperature): table for temperature, table in tables.items()},
            "repeated_8_grams": {str(temperature): share for temperature, share in
                                 repeated.items()}}


def machine(model, tokenizer, prompts, args):
    """What doesn't depend on drafts: the prompt's forward, what rows cost, how near plain decoding
    comes to what memory allows, and to a cached loop without any tree."""
    cost, (weights, bandwidth) = rows_cost(model, [1, 2, 4, 8, 16, 32, 64]), roofline(model)
    pairs = []
    for prompt in prompts:
        call = min(args.limit, model.config.block_size - len(prompt)), tokenizer.stop
        run = generate(model, prompt, None, Tree(), *call)
        ids, seconds = cached_loop(model, prompt, *call)
        assert ids == run["ids"], "the yardstick is broken"
        if run["steps"]:
            pairs.append((seconds / run["seconds"], run["seconds"] / run["steps"],
                          run["prompt_seconds"]))
    ratio, step, first = (statistics.median(x) for x in zip(*pairs))
    print("\na step on N rows: " + ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in cost.items())
          + f"\na prompt's own forward: {first * 1e3:.1f} ms\n"
          f"plain decoding: {step * 1e3:.2f} ms a step; reading {weights / 1e6:.1f} MB of weights "
          f"at {bandwidth / 1e9:.1f} GB/s takes {1e3 * weights / bandwidth:.2f} ms, "
          f"{weights / bandwidth / step:.0%} of it\n"
          f"the loop of tree.py runs at {ratio:.2f}x the speed of a cached loop written by hand")
    return {"step_cost": cost, "roofline": weights / bandwidth / step, "bandwidth": bandwidth,
            "against_hand_written": ratio}


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
            row["expected"] = None if name in dynamic else 1 + sum(
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


QUICK, TEACHER = (4, 30), {"objective": "teacher"}
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
    path, (seconds, steps) = Path(args.out) / "ablation.pt", QUICK if args.quick else (60, 300)
    rows, bound = load_file(path) if path.exists() else {}, fingerprint(model)
    ids, counting = (torch.tensor(tokenizer.encode_all(part), device=args.device)
                     for part in hold_out(hold_out(read_corpus(args.data))[0], 20))
    T = model.config.block_size
    task = argparse.Namespace(seed=0, text_seconds=seconds / 2, text_rows=256, block_size=T,
                              heads_batch=2, heads_lr=2e-3)
    text = [x.flatten(0, 1) for x in own_text(model, ids, task)]
    begin = windows(counting, 32, T // 4, torch.Generator().manual_seed(3))
    counting = {t: write_text(model, begin, T // 2, t) for t in (0.0, 1.0)}
    for (name, (Heads, options)), same in product(ROWS.items(), ("time", "tokens")):
        key = f"{name:18} same {same}, {seconds if same == 'time' else steps}"
        if rows.get(key, {}).get("bound") != bound:
            heads = Heads(model, **options).to(args.device)
            train_heads(model, {"x": heads}, *text, task, Progress(key, seconds) if same == "time"
                        else Steps(key, steps))
            heads.ready()
            rows[key] = {"bound": bound} | measure_heads(heads, counting, prompts, tokenizer, args)
            save_file(path, rows)
        print(f"{key:36}" + "".join(f"{what} {value:.2f}  " for what, value in rows[key].items()
                                    if what != "bound"), flush=True)
    return rows


def measure_heads(heads, counting, prompts, tokenizer, args):
    """Tokens per step with 16 nodes, greedy and at temperature 1; greedily also with the number of
    nodes that pays, and the speed there; millions of weights that a level reads on average;
    milliseconds of drafting 16 nodes."""
    row, model, depth = {}, heads.base, heads.max_depth
    for temperature, (tokens, h, noise) in counting.items():
        ranks = heads.ranks(h, tokens, noise)[:, model.config.block_size // 4 - 1:]
        (counted, total), choose = count_steps(ranks.tolist()), Sampler(temperature)
        auto = 16 if temperature else best_size(counted, total, step_cost(
            model, heads, counted, prompts[:2], choose))[0]
        methods = {n: (heads, Tree([p for p, _ in counted[:n - 1]], args.device))
                   for n in (1, 16, auto)}
        runs = measure(model, tokenizer, prompts, methods, args.limit, choose)
        got = {n: summary(model, prompts, runs[1], runs[n], *methods[n], choose) for n in methods}
        row[f"T={temperature:.0f}"] = got[16]["tokens_per_step"]
        if not temperature:
            row |= {"auto": auto, "auto tokens": got[auto]["tokens_per_step"],
                    "auto speed": got[auto]["speedup"],
                    "draft ms": 1e3 * draft_seconds(heads, methods[16][1], choose)}
    return row | {"M weights": drafting_weights(heads, depth) / depth / 1e6}


def check_plot(path):
    """UserError where no picture can be drawn, before minutes are spent on measuring."""
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which isn't installed")
    if Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--plot {path}: the name has to end in .png, .pdf or .svg")
    try:
        open(path, "ab").close()
    except OSError as error:
        raise UserError(f"--plot {path} can't be written: {error.strerror}") from None


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
    parser.add_argument("--plot", metavar="FILE", help="draw the comparison (needs matplotlib)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the base model")
    args = parser.parse_args()
    if args.plot:
        check_plot(args.plot)
    args.device, args.limit = pick_device(args.device), 48 if args.quick else 128
    args.prompts = args.prompts or (6 if args.quick else 40 if args.what == "compare" else 20)
    model, tokenizer, prompts = load_base(args.out, args.device)
    prompts = prompts[:args.prompts]
    if args.compile:
        compile_forward(model)
    if len(prompts) < (least := 4 if args.what == "trim" else 2):
        raise UserError(f"{len(prompts)} standard prompts are too few, {least} are needed: ask for "
                        "more, or train on more text")
    print(json.dumps(COMMANDS[args.what](model, tokenizer, prompts, args)))


if __name__ == "__main__":
    command(main)
