"""The exercises grade themselves: the tests that an exercise names fail while its function is
blank. (That they pass with the solution is what the rest of the suite shows.)"""
import ast
import re
import shutil
import subprocess
import sys

import pytest
from blank import blank, main
from helpers import ROOT

PAGE = (ROOT / "exercises.md").read_text("utf-8")
EXERCISES = re.findall(r"`python tests/blank\.py ([\w.]+)`.*?`pytest ([^`]+)`", PAGE, re.DOTALL)

NO_SHRINKING = """
hypothesis.settings.register_profile("grade", hypothesis.settings.get_profile("hydra"),
                                     phases=[hypothesis.Phase.generate])
hypothesis.settings.load_profile("grade")
"""


def test_the_page_has_exercises():
    assert len(EXERCISES) == PAGE.count("tests/blank.py") - 1 >= 8  # once it is explained


@pytest.mark.parametrize("target, tests", EXERCISES)
def test_a_blank_function_is_graded_red(target, tests, tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests",
                    ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "tests" / "conftest.py", "a", encoding="utf-8") as conftest:
        conftest.write(NO_SHRINKING)
    main(target, tmp_path)
    done = subprocess.run([sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p",
                           "no:cacheprovider", *tests.split()], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 1 and "NotImplementedError" in done.stdout, done.stdout


def test_blank_keeps_docstring_and_neighbours():
    source = 'class A:\n    x = 1\n\n    def f(self):\n        """What."""\n        # why\n' \
             '        return 2\n\n    def g(self):\n        return 3\n'
    tree = ast.parse(blank(source, "A.f"))
    f, g = tree.body[0].body[1:]
    assert ast.get_docstring(f) == "What." and isinstance(f.body[1], ast.Raise)
    assert isinstance(g.body[0], ast.Return) and "why" not in blank(source, "A.f")
    assert isinstance(ast.parse(blank(source, "A.g")).body[0].body[2].body[0], ast.Raise)
