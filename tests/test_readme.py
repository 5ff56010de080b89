"""What the README shows, it shows truly."""
import doctest

from helpers import ROOT


def test_examples_in_the_readme():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.failed == 0 < result.attempted
