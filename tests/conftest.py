"""`ppo` is each script as a module; in tests marked `shared` (not `both`), of what both have, the first alone."""

import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = ("ppo_llm", "ppo_llm_continuous_batching")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # one of several workers, which share the cores
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    # First, so that one worker has all of them: each worker that has one of them makes the runs that they share.
    items.sort(key=lambda item: item.module.__name__ != "test_distributed")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
    gc.freeze()  # the collector passes over what has been imported


def pytest_generate_tests(metafunc):
    if "ppo" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        first_only = marked("shared") and not marked("both")
        metafunc.parametrize("ppo", SCRIPTS[:1] if first_only else SCRIPTS, indirect=True)


def slow_but(quick, names):
    """Parameters of a test. It is slow with all of them but those that are quick."""
    assert set(quick) < set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def ppo(request):
    if not dist.is_initialized():  # as `connect` of the scripts does
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return importlib.import_module(request.param)
