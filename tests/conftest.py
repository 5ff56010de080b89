import sys
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

# deadline=None: CI machines stall; derandomize: the same cases every time. HYDRA_CASES=50 runs that many
# times more of them, other ones at each run.
import os  # noqa: E402

torch.set_num_threads(1)  # the models are tiny: threads would only wait for one another
more = int(os.environ.get("HYDRA_CASES", "1"))
hypothesis.settings.register_profile("hydra", deadline=None, derandomize=more == 1, database=None,
                                     suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("hydra")


@pytest.fixture(autouse=True)
def float64():
    """All tests compute in float64, where "equal" means equal; commands run in processes of their own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
