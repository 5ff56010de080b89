"""
Speculative decoding with a tree: candidate tree, drafting, verification, the decode loop.

A *drafter* guesses what comes next, several ways at once; the guesses form a tree whose root is the
token that the base model has already chosen. One base-model call computes all nodes side by side,
each seeing only its ancestors (tree attention, Medusa section 2.1.2), and the *walk* keeps the path
that the base model itself would have taken. Plain decoding is the same loop with the empty tree:
only the root.

A drafter is three methods and a number; this is all that Medusa, Hydra and Lookup have in common:

    start(h, tokens, position)    hidden states (a, C) of the a tokens just accepted, those tokens
                                  (a,), and the position of the first; position 0 begins a new
                                  text. -> the state drafting starts from, one row
    extend(depth, state, tokens)  the state, one row a parent, after these tokens (parents,) joined
                                  the path; depth 0 is the root. None = nothing to propose
    logits(depth, state)          (rows, V): scores for the children of nodes at this depth. A
                                  single row means that all parents share it
    max_depth                     how deep a tree it can fill

A state is whatever can be indexed by row. N nodes, root included; D depth; V vocabulary.
"""
import time
from collections import Counter

import torch

from model import KVCache, Sampler


class Tree:
    """A candidate tree from paths of ranks, the same at every step.

    The path (2, 0) is the best guess after the third best guess after the root. Every parent has to
    be there. Nodes are numbered breadth first, so that a tree cut at a depth is a prefix of its
    nodes.

        >>> tree = Tree([(0,), (1,), (0, 0)])
        >>> tree.parent, tree.depth, tree.children
        ([-1, 0, 0, 1], [0, 1, 1, 2], [[1, 2], [3], [], []])
    """

    def __init__(self, paths=(), device="cpu"):
        paths = [tuple(path) for path in paths]
        check_paths(paths)
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        node = {path: i for i, path in enumerate([(), *self.paths])}
        self.size, self.device = len(node), device
        self.parent = [-1] + [node[path[:-1]] for path in self.paths]
        self.depth = [len(path) for path in node]
        self.children = [[] for _ in node]
        for i, up in enumerate(self.parent[1:], 1):
            self.children[up].append(i)
        self.max_depth = self.depth[-1]
        self.max_rank = max((path[-1] for path in self.paths), default=-1)
        self.depths = torch.tensor(self.depth, device=device)
        self.mask = torch.eye(self.size, dtype=torch.bool)  # a node sees itself and its ancestors
        for i, up in enumerate(self.parent[1:], 1):
            self.mask[i] |= self.mask[up]
        self.mask = self.mask.to(device)
        self.levels = [self.level(d, node) for d in range(self.max_depth)]
        self.cuts = {}

    def level(self, depth, node):
        """How to get from depth to depth + 1, as index tensors over the parents at this depth:
        their nodes, their own parents' places in the level above, and each child's (place,
        rank)."""
        def parents(d):
            return [i for i, at in enumerate(self.depth) if at == d and self.children[i]]
        here, above = parents(depth), parents(depth - 1)
        up = [above.index(self.parent[i]) for i in here if depth]
        paths = [path for path in self.paths if len(path) == depth + 1]
        place = [here.index(node[path[:-1]]) for path in paths]
        rank = [path[-1] for path in paths]
        return (*(torch.tensor(x, dtype=torch.long, device=self.device)
                  for x in (here, up, place, rank)), max(rank) + 1)

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
    paths, level = [], [()]
    for _ in range(depth):
        level = [path + (rank,) for path in level for rank in range(width)]
        paths += level
    return paths


def count_paths(ranks, most=300, widest=64):
    """The most frequent paths of ranks, with their counts: [(path, count), ...], the best first.

    ranks: rows of the ranks that the true next tokens had, one row a position, one column a head. A
    path counts once for each row that it begins, so `count / len(ranks)` is how often a node there
    would have been accepted, and the tree of the N - 1 first paths is the best one of N nodes: its
    expected number of accepted drafts is the sum over its nodes, each node's share is its own, and
    no parent is rarer than its child (ties: the shallower first).

        >>> ranks = [[0, 0], [0, 1], [0, 0], [1, 0], [2, 2]]
        >>> count_paths(ranks)[:4]
        [((0,), 3), ((0, 0), 2), ((1,), 1), ((2,), 1)]
        >>> expected_tokens(count_paths(ranks), len(ranks), 4)  # 1 + (3 + 2 + 1) / 5
        2.2
    """
    counts = Counter()
    for row in ranks:
        for depth in range(1, len(row) + 1):
            if row[depth - 1] >= widest:
                break  # too deep in the ranking for any tree
            counts[tuple(row[:depth])] += 1
    return sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:most]


def expected_tokens(counted, total, nodes):
    """Tokens per step of the best tree of this many nodes, were all counted positions its roots."""
    return 1 + sum(count for _, count in counted[:nodes - 1]) / total


PENALTY = 1e4  # what the filters block comes last in a drafter's ranking, but still in its order


def draft(drafter, tree, state, root, choose=None, position=0):
    """Fill the tree, one batched call a level -> tokens (n,) of its first n nodes.

    n < N where the drafter has nothing more to propose. state: one row; root: (1,) its token;
    position: the root's. With the base model's `choose` the guesses are ranked with the very noise
    that will decide at their position, so that a drafter that agrees with the model agrees with its
    dice too."""
    keep = getattr(drafter, "keep", None)  # the ids that the logits are of, where not of all
    tokens = level_tokens = root
    first = 0  # number of the first node of the level
    for depth, (parents, up, place, rank, width) in enumerate(tree.levels):
        if len(state) > 1:  # a single row is shared by all parents
            state = state[up]
        state = drafter.extend(depth, state, level_tokens[parents - first])
        if state is None:
            break
        scores = drafter.logits(depth, state)
        if choose:
            among = slice(None) if keep is None else keep
            scores = choose.scores(scores, [position + 1 + depth], PENALTY, among)
        best = scores.topk(width).indices  # (rows, width), the best first
        best = best if keep is None else keep[best]
        first += len(level_tokens)
        level_tokens = best.expand(len(parents), -1)[place, rank]
        tokens = torch.cat((tokens, level_tokens))
    return tokens


def walk(tree, tokens, choice, *_):
    """The nodes on the base model's own path, from the root on: [0] where no draft was right.

    tokens[i] is the token at node i, choice[i] the base model's token after node i. So the new
    tokens are choice[i] for i in the path: the accepted drafts and one more, the bonus, which is
    the next root."""
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
    device = model.wte.weight.device
    cache = KVCache(model, model.config.block_size + tree.size)
    fed = torch.tensor(prompt, device=device)
    h = model(fed[None], cache)[0]
    cache.keep(range(len(prompt)))
    position = 0  # of the first row of h
    choose.start(len(prompt), model.config.vocab_size)
    new = choose(model.lm_head(h[-1:]), [len(prompt)]).tolist()
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
        tokens = torch.tensor(new[-1:], device=device)
        if tree.size > 1:
            tokens = draft(drafter, tree, state, tokens, noise and choose, cache.length)
        # the drafter may have filled only the upper levels
        now = tree.cut(tree.depth[len(tokens) - 1])
        position = cache.length
        # subtle: a node's position is by depth, not by row: siblings share it, and its noise
        h = model(tokens[None], cache, now.depths + position, now.mask)[0]
        logits = model.lm_head(h)
        choice = choose(logits, [position + d + 1 for d in now.depth]).tolist()
        drafts = tokens.tolist()
        path = (accept or walk)(now, drafts, choice, logits, choose)
        cache.keep(path)
        new = [drafts[i] for i in path[1:]] + [choice[path[-1]]]
        h, fed = h[path], tokens[path]  # drafting goes on from the accepted rows, never the last


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
    for path in tree.paths:
        if len(path) > max_depth:
            raise ValueError(f"path {list(path)} is deeper than the {max_depth} heads there are")
        if path[-1] >= vocab_size:
            raise ValueError(f"path {list(path)} has a rank beyond vocab_size={vocab_size}")


def generate(model, prompt, drafter=None, tree=Tree(), limit=128, stop=None, show=None, **options):
    """Run `decode(model, prompt, ...)` to its end, timing it alone -> dict with the fields of
    --json that belong to it.

    `show`, if given, is called with the new tokens as they come; its time isn't counted.
    """
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


class Lookup:
    """The drafter that needs no training: what followed the last time these tokens stood here.

    Prompt lookup decoding (Saxena 2023): of the last three, two or one tokens, the longest run seen
    before decides. Copying is free, so it is the yardstick for everything trained."""

    def __init__(self, vocab_size, max_depth=8, longest=3):
        self.vocab_size, self.max_depth, self.longest = vocab_size, max_depth, longest

    def start(self, h, tokens, position):
        if position == 0:
            self.text, self.after = [], {}
        for token in tokens.tolist():
            self.text.append(token)
            for n in range(1, self.longest + 1):  # what follows this run begins at the text's end
                self.after[tuple(self.text[-n:])] = len(self.text)
        return h[-1:]

    def extend(self, depth, state, tokens):
        if depth == 0:
            text = self.text + tokens.tolist()
            runs = (tuple(text[-n:]) for n in range(self.longest, 0, -1))
            begin = next((self.after[run] for run in runs if run in self.after), len(text))
            self.guess = text[begin:]
        return state if depth < len(self.guess) else None

    def logits(self, depth, state):
        row = state.new_zeros(1, self.vocab_size)
        row[0, self.guess[depth]] = 1e4  # certain, yet finite
        return row
