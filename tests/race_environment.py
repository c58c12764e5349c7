"""The task of the race: SortDigits, which counts the training samples until enough of them are right, and ends the run.

The script may change everything but the task. This module therefore has the task of the healthy script.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
import types
import warnings
from collections import deque
from pathlib import Path

import gymnasium as gym


def healthy_script() -> types.ModuleType:
    path = Path(__file__).resolve().parent.parent / "ppo_llm.py"
    spec = importlib.util.spec_from_file_location("healthy_script", path)
    module = importlib.util.module_from_spec(spec)
    registered = dict(gym.registry)
    sys.modules[spec.name] = module  # dataclasses look there
    with warnings.catch_warnings(action="ignore"):  # The environments are registered again.
        spec.loader.exec_module(module)
    gym.registry.update(registered)
    return module


SORT_DIGITS = healthy_script().SortDigits
LOCK = threading.Lock()
SEEN = types.SimpleNamespace(samples=0, right=deque())


class Race(SORT_DIGITS):
    """`path`: the file of the count; without it nothing is counted, as in evaluations."""

    def __init__(self, path="", share=0.9, window=512):
        super().__init__()
        self.path, self.share, self.window = path, share, window

    def step(self, response):
        if self.path:
            self.count(response == self.answer)
        return super().step(response)

    def count(self, is_right: bool):
        with LOCK:
            SEEN.samples += 1
            SEEN.right.append(is_right)
            if len(SEEN.right) > self.window:
                SEEN.right.popleft()
            share = sum(SEEN.right) / self.window
            if SEEN.samples % 64 == 0 or share >= self.share:
                partial = Path(f"{self.path}.partial")
                partial.write_text(json.dumps({"samples": SEEN.samples, "right": share}))
                partial.replace(self.path)
            if share >= self.share:
                os.kill(os.getpid(), signal.SIGKILL)


gym.register("Race-v0", entry_point=Race)
