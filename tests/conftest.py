"""Fixtures. `ppo` is the script under test as a module: a test that takes it runs once for each script there is."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = [name for name in ("ppo_llm", "ppo_llm_continuous_batching") if (ROOT / f"{name}.py").exists()]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds; left out unless --slow is given")


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


@pytest.fixture(params=SCRIPTS)
def ppo(request):
    return importlib.import_module(request.param)
