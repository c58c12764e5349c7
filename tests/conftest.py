"""Fixtures. `ppo` is the script under test as a module: a test that takes it runs once for each script there is.

Those marked `shared`, and not `both`, run on the first alone: they try what is the same in
both, as test_diff.py makes sure.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = ("ppo_llm", "ppo_llm_continuous_batching")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # one of several, which share the cores
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    config.addinivalue_line("markers", "slow: takes more than a few seconds; left out unless --slow is given")
    config.addinivalue_line("markers", "shared: about what is the same in both scripts; runs on the first")
    config.addinivalue_line("markers", "both: runs on both scripts in a module that is marked `shared`")


def pytest_generate_tests(metafunc):
    if "ppo" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        one = marked("shared") and not marked("both")
        metafunc.parametrize("ppo", SCRIPTS[:1] if one else SCRIPTS, indirect=True)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def ppo(request):
    return importlib.import_module(request.param)
