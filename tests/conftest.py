import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

# deadline=None: CI machines stall; derandomize: the same cases every time. HYDRA_CASES=50 runs
# that many times more of them, other ones at each run.
torch.set_num_threads(1)  # the models are tiny: threads would only wait for one another
more = int(os.environ.get("HYDRA_CASES", "1"))
hypothesis.settings.register_profile("hydra", deadline=None, derandomize=more == 1, database=None,
                                     suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("hydra")


@pytest.fixture(autouse=True)
def float64():
    """All tests compute in float64, where "equal" means equal; commands run in processes of their
    own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """A folder trained for some seconds, of --quick size, in float32, on the text of this
    project."""
    import train
    from helpers import ROOT, run
    folder = tmp_path_factory.mktemp("run")
    data = folder / "data.txt"
    files = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]
    data.write_text("".join(path.read_text("utf-8") for path in files), "utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(monkeypatch, train, "--quick", "--data", data, "--out", folder / "out",
                   "--vocab-size", 512, "--base-seconds", 11, "--text-seconds", 1,
                   "--heads-seconds", 9) == 0
    torch.set_num_threads(threads)
    return folder / "out"
