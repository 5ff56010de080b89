"""
Cut an assignment: a function loses its body and keeps its docstring.

    python tests/blank.py tree.walk

rewrites tree.py; `git checkout tree.py` brings the solution back. exercises.md says which functions
are worth it, and which tests grade them.
"""
import ast
import sys
from pathlib import Path


def blank(source, name):
    """source without the body of `name` ("walk", "Hydra.extend")."""
    node = ast.parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    first, lines = node.body[0], source.splitlines(keepends=True)
    begin = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
    lines[begin:node.end_lineno] = [" " * first.col_offset + "raise NotImplementedError\n"]
    return "".join(lines)


def main(target, folder=Path(__file__).parents[1]):
    module, _, name = target.partition(".")
    path = Path(folder) / f"{module}.py"
    path.write_text(blank(path.read_text("utf-8"), name), "utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (TypeError, OSError, StopIteration):
        print("blank.py: say which function, such as tree.walk or hydra.Hydra.extend",
              file=sys.stderr)
        sys.exit(2)
