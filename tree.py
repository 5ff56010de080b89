"""
Speculative decoding with a tree: candidate tree, drafting, verification, the decode loop.

A *drafter* guesses what comes next, several ways at once; the guesses form a tree whose root is the
token that the base model has already chosen. One base-model call computes all nodes side by side,
each seeing only its ancestors (tree attention, Medusa section 2.1.2), and the *walk* keeps the path
that the base model itself would have taken. Plain decoding is the same loop with only the root.

A drafter is three methods and a number; this is all that Medusa, Hydra and Lookup have in common:

    start(h, tokens, position)    hidden states (a, C) of the a tokens just accepted, those tokens
                                  (a,), and the position of the first; position 0 begins a new
                                  text. -> the state drafting starts from, one row
    extend(depth, state, tokens)  the state, one row a parent, after these tokens (parents,) joined
                                  the path; depth 0 is the root. None = nothing to propose
    logits(depth, state)          (rows, V): scores for the children of nodes at this depth; a
                                  single row is shared by all parents
    max_depth                     how deep a tree it can fill

A state is whatever can be indexed by row. N nodes, root included; D depth; V vocabulary.
"""
import json
import sys
import time
from itertools import product

import torch

from model import KVCache, Sampler


class Nodes:
    """The shape of a tree from each node's parent, a node of lower number; node 0 is the root."""

    def __init__(self, parent, device="cpu"):
        self.parent, self.size, self.device = parent, len(parent), device
        self.depth, self.children = [0], [[] for _ in parent]
        for i, up in enumerate(parent[1:], 1):
            self.depth.append(self.depth[up] + 1)
            self.children[up].append(i)
        self.max_depth = max(self.depth)
        self.depths = torch.tensor(self.depth, device=device)
        self.mask = torch.eye(self.size, dtype=torch.bool, device=device)
        up = torch.tensor([0, *parent[1:]], device=device)
        for _ in range(self.max_depth):  # a node sees itself and what its parent sees
            self.mask |= self.mask[up]


class Tree(Nodes):
    """A candidate tree from paths of ranks, the same at every step.

    The path (2, 0) is the best guess after the third best guess after the root; its parent (2,)
    has to be there. Breadth first, so that a tree cut at a depth is a prefix of its nodes.

        >>> tree = Tree([(0,), (1,), (0, 0)])
        >>> tree.parent, tree.depth, tree.children
        ([-1, 0, 0, 1], [0, 1, 1, 2], [[1, 2], [3], [], []])
    """

    def __init__(self, paths=(), device="cpu"):
        paths = [tuple(path) for path in paths]
        check_paths(paths)
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        node = {path: i for i, path in enumerate([(), *self.paths])}
        super().__init__([-1] + [node[path[:-1]] for path in self.paths], device)
        self.max_rank = max((path[-1] for path in self.paths), default=-1)
        self.levels = [self.level(d, node) for d in range(self.max_depth)]
        self.cuts = {}

    def level(self, depth, node):
        """Of the nodes at depth + 1: the number of their parents, how many guesses each of these
        needs; and as index tensors their parents' places, their ranks, which have children too."""
        paths = [path for path in self.paths if len(path) == depth + 1]
        parents = sorted({path[:-1] for path in paths})
        place, rank = [parents.index(path[:-1]) for path in paths], [path[-1] for path in paths]
        onward = [i for i, path in enumerate(paths) if self.children[node[path]]]
        return len(parents), max(rank) + 1, *(torch.tensor(x, dtype=torch.long, device=self.device)
                                              for x in (place, rank, onward))

    def cut(self, depth, width=None):
        """The tree down to this depth, and with ranks below `width` (what a drafter can
        propose)."""
        width = self.max_rank + 1 if width is None else width
        if depth >= self.max_depth and width > self.max_rank:
            return self
        if (depth, width) not in self.cuts:
            paths = [p for p in self.paths if len(p) <= depth and max(p) < width]
            self.cuts[depth, width] = Tree(paths, self.device)
        return self.cuts[depth, width]

    def pick(self, depth, scores):
        """scores (rows, k) of the parents' children -> the places of the nodes' parents, which of
        the k they are, and which nodes go on."""
        parents, width, place, rank, onward = self.levels[depth]
        best = scores.topk(width).indices.expand(parents, -1)  # the best first
        return place, best[place, rank], onward

    def filled(self, tokens):
        return self.cut(self.depth[len(tokens) - 1]), tokens


class Dynamic:
    """A tree grown anew at each step where the drafter is confident (EAGLE-2, Li et al. 2024;
    OPT-Tree, Wang et al. 2024).

    Level by level, the `width` likeliest nodes get children; of all these candidates the likeliest
    size - 1 stay. A node's likelihood is the product of softmax(draft logits + temperature * noise)
    along its path, so no parent is less likely than its child. The softmax is sharpened: a token is
    the choice more often than it is likely."""
    paths, sharp = (), 1.5  # any rank may come, and none is too high

    def __init__(self, size, max_depth, width=8):
        self.size, self.max_depth, self.width = size, max_depth, width

    def cut(self, depth, width=None):
        if depth < 1 or self.size == 1:
            return Tree()
        return self if depth >= self.max_depth else Dynamic(self.size, depth, self.width)

    def pick(self, depth, scores):
        if depth == 0:
            self.parent, self.value = [torch.tensor([-1])], [scores.new_zeros(1)]
        likely = self.value[-1][:self.width, None] + (self.sharp * scores).log_softmax(-1)
        best, flat = likely.flatten().topk(min(self.size - 1, likely.numel()))
        place, which = flat // likely.shape[1], flat % likely.shape[1]
        above = sum(map(len, self.parent[:-1]))  # how many nodes come before the parents' level
        self.parent.append(above + place)
        self.value.append(best)
        return place, which, slice(self.width)

    def filled(self, tokens):
        if len(tokens) == 1:  # nothing was proposed
            return Tree(), tokens
        # subtle: a stable order puts a parent before a child that is just as likely
        order = torch.cat(self.value).argsort(descending=True, stable=True)[:self.size]
        number = {node: i for i, node in enumerate(order.tolist())}
        parents = torch.cat([x.to(order) for x in self.parent])[order].tolist()
        return Nodes([-1] + [number[up] for up in parents[1:]], tokens.device), tokens[order]


def check_paths(paths):
    """ValueError naming the first path that can't stand in a tree."""
    seen = {()}
    for path in sorted(paths, key=len):
        if not path or not all(type(rank) is int and 0 <= rank < 2**31 for rank in path):
            raise ValueError(f"path {list(path)} isn't a list of ranks, whole numbers from 0")
        if path in seen:
            raise ValueError(f"path {list(path)} is there twice")
        if path[:-1] not in seen:
            raise ValueError(f"path {list(path)} has no parent {list(path[:-1])} in the tree")
        seen.add(path)


def chain(depth):
    """The paths of a chain: the best guess, `depth` times."""
    return [(0,) * d for d in range(1, depth + 1)]


def full(depth, width):
    """The paths of the full tree: `width` guesses after every node, down to `depth`."""
    return [path for d in range(1, depth + 1) for path in product(range(width), repeat=d)]


def guesses(drafter, depth, state, choose, position):
    """-> scores (rows, k) for the children of nodes at this depth, and the k ids they are of (None:
    all). With the base model's `choose` they have the very noise that will decide at their
    position, so that a drafter that agrees with the model agrees with its dice too."""
    keep, lucky = getattr(drafter, "keep", None), getattr(drafter, "lucky", 0)
    if keep is None or not (choose and lucky):
        scores, ids = drafter.logits(depth, state), keep
    else:  # drafts of a trimmed vocabulary: whatever has much noise may win here as well
        noise = choose.gumbel(position + 1 + depth, state).index_fill(0, keep, -torch.inf)
        extra = noise.topk(lucky).indices
        scores, ids = drafter.logits(depth, state, extra), torch.cat((keep, extra))
    at = slice(None) if ids is None else ids
    return choose.scores(scores, [position + 1 + depth], PENALTY, at) if choose else scores, ids


PENALTY = 1e4  # what the filters block comes last in a drafter's ranking, but still in its order


def draft(drafter, tree, state, root, choose=None, position=0):
    """Fill the tree, one batched call a level -> the nodes that were filled, their tokens.

    Fewer than asked for where the drafter has nothing more to propose. state: one row; root: (1,)
    its token; position: the root's."""
    tokens, level = [root], root  # level: those of the last tokens that get children
    for depth in range(tree.max_depth):
        state = drafter.extend(depth, state, level)
        if state is None:
            break
        scores, ids = guesses(drafter, depth, state, choose, position)
        place, which, onward = tree.pick(depth, scores)
        tokens.append(which if ids is None else ids[which])
        level = tokens[-1][onward]
        state = state if len(state) == 1 else state[place[onward]]  # a single row serves all
    return tree.filled(torch.cat(tokens))


def walk(tree, tokens, choice, *_):
    """The nodes on the base model's own path, from the root on: [0] where no draft was right.

    tokens[i] is the token at node i, choice[i] the base model's token after it. So the new tokens
    are choice[i] for i in the path: the accepted drafts and the bonus, which is the next root."""
    path, node = [0], 0
    while True:
        node = next((c for c in tree.children[node] if tokens[c] == choice[node]), None)
        if node is None:
            return path
        path.append(node)


@torch.inference_mode()  # as decorator: inside a generator a `with` would leak to the caller
def decode(model, prompt, drafter=None, tree=Tree(), limit=128, stop=None, choose=Sampler(),
           noise=True, accept=None):
    """Yield lists of new tokens: first the one that the prompt's forward gives, then each step's.

    prompt: ids, 1 to block_size of them. Ends after `stop`, after `limit` tokens or at the end of
    the context; the last token is emitted and never fed. The text doesn't depend on drafter and
    tree; nor on `noise`, which says whether drafts are ranked with the sampler's noise. Another
    `accept` than walk is lossy. ValueError where the tree is deeper than the drafter fills."""
    room = check_call(model, prompt, drafter, tree, limit)
    if room == 0:
        return
    cache = KVCache(model, model.config.block_size + tree.size)
    fed = torch.tensor(prompt, device=model.wte.weight.device)
    h = model(fed[None], cache)[0]
    cache.keep(range(len(prompt)))
    position = 0  # of the first row of h
    choose.start(len(prompt), model.config.vocab_size)
    root = choose(model.lm_head(h[-1:]), [len(prompt)])
    new = root.tolist()
    if getattr(drafter, "keep", None) is not None:
        tree = tree.cut(tree.max_depth, len(drafter.keep))  # ranks that can't be drafted
    while True:
        if stop in new:
            new = new[:new.index(stop) + 1]
        room -= len(new)
        done = room == 0 or new[-1] == stop
        # a step with m drafts accepted emits m + 1 tokens: the tree never outgrows the room
        tree = tree.cut(room - 1)
        if not done and tree.size > 1:
            state = drafter.start(h, fed, position)
        yield new
        if done:
            return
        position, now, tokens = cache.length, tree, root
        if tree.size > 1:
            now, tokens = draft(drafter, tree, state, root, noise and choose, position)
        # subtle: a node's position is by depth, not by row: siblings share it, and its noise
        h = model(tokens[None], cache, now.depths + position if now.size > 1 else None, now.mask)[0]
        logits = model.lm_head(h)
        chosen = choose(logits, [position + d + 1 for d in now.depth])
        choice, drafts = chosen.tolist(), tokens.tolist()
        path = (accept or walk)(now, drafts, choice, logits, choose)
        cache.keep(path)
        new, root = [drafts[i] for i in path[1:]] + [choice[path[-1]]], chosen[path[-1], None]
        h, fed = (h[path], tokens[path]) if now.size > 1 else (h, tokens)  # the accepted rows


def check_call(model, prompt, drafter, tree, limit):
    """The room: how many tokens may come. ValueError where the arguments don't fit one another."""
    block_size = model.config.block_size
    if not 1 <= len(prompt) <= block_size:
        raise ValueError(f"a prompt has 1 to block_size={block_size} tokens, not {len(prompt)}")
    if limit < 0:
        raise ValueError(f"limit={limit} is negative")
    check_tree(tree, drafter.max_depth if drafter else 0, model.config.vocab_size)
    return min(limit, block_size - len(prompt))


def check_tree(tree, max_depth, vocab_size):
    """ValueError naming a path that a drafter of this depth and vocabulary can't fill."""
    for path in tree.paths or chain(tree.max_depth):
        if len(path) > max_depth:
            raise ValueError(f"path {list(path)} is deeper than the {max_depth} heads there are")
        if path[-1] >= vocab_size:
            raise ValueError(f"path {list(path)} has a rank beyond vocab_size={vocab_size}")


def generate(model, prompt, drafter=None, tree=Tree(), limit=128, stop=None, show=None, **options):
    """Run `decode(model, prompt, ...)` to its end, timing it alone -> its fields of --json.

    `show`, if given, is called with the new tokens as they come; its time isn't counted."""
    steps, seconds = [], []
    run = decode(model, prompt, drafter, tree, limit, stop, **options)
    while True:
        begin = time.perf_counter()
        new = next(run, None)
        seconds.append(time.perf_counter() - begin)
        if new is None:
            break
        steps.append(new)
        if show:
            show(new)
    ids = [token for new in steps for token in new]
    accepted = [len(new) for new in steps[1:]]  # the first token came from the prompt's own forward
    finish = "stop" if ids and ids[-1] == stop else "length" if len(ids) == limit else "context"
    return {"ids": ids, "finish": finish, "steps": len(accepted), "accepted": accepted,
            "tokens_per_step": sum(accepted) / len(accepted) if accepted else None,
            "seconds": sum(seconds[1:]), "prompt_seconds": seconds[0]}


def picture(tree, labels=None, path=()):
    """A line a node, children below their parent: its name, and which nodes it sees in tree
    attention; > before the nodes of `path`."""
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack += reversed(tree.children[order[-1]])
    names = ["  " * tree.depth[i] + (labels[i] if labels else f"{i}") for i in order]
    marks = tree.mask.tolist()
    return "\n".join(f"{'>' if i in path else ' '} {name:<{max(map(len, names))}}  "
                     + " ".join("#" if marks[i][j] else "." for j in order).rstrip(". ")
                     for i, name in zip(order, names))


def parse_paths(text):
    paths = json.loads(text)
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise ValueError("it is no list of lists of ranks")
    return paths


if __name__ == "__main__":
    try:
        print(picture(Tree(parse_paths(sys.argv[1]) if sys.argv[1:] else full(3, 2))))
    except (ValueError, RecursionError) as error:
        print(f"tree.py: {error}; say paths such as [[0],[1],[0,0]]", file=sys.stderr)
        sys.exit(2)
