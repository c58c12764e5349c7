"""benchmarks/compare.py: the reference runs are inside of their band, a run with other numbers is not."""

import json
import sys

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.shared, pytest.mark.slow]
sys.path.append(str(ROOT / "benchmarks"))


def test_a_metric_that_leaves_its_band_is_named():
    pytest.importorskip("matplotlib")
    import compare

    rows = [json.loads(line) for line in compare.RESULTS.read_text().splitlines()]
    runs = [run for run in rows if run["task"] == "default"]
    left = lambda mine: [name for name, found in compare.compare(mine, runs).items() if found[3] is not None]
    for mine in runs:
        assert len(runs) >= 3 and left(mine) == []
        tenth = {name: points[:5] for name, points in mine["points"].items()}  # unfinished
        assert left({"points": tenth}) == []
        assert left({"points": tenth | {"critic/value_mean": [0.0] * 5}}) == ["critic/value_mean"]
        far = [x + 1.5 for x in tenth["actor/approx_kl"]]  # 4.5 times as much
        assert left({"points": tenth | {"actor/approx_kl": far}}) == ["actor/approx_kl"]
