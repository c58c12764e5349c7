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

    tasks = {}
    for line in compare.RESULTS.read_text().splitlines():
        run = json.loads(line)
        tasks.setdefault(run["task"], []).append(run)
    assert {len(runs) >= 3 for runs in tasks.values()} == {True}
    left = lambda mine, others: [name for name, found in compare.compare(mine, others).items() if found[3] is not None]
    runs = tasks["default"]
    for mine in runs:
        assert left(mine, runs) == []
        tenth = {name: points[:5] for name, points in mine["points"].items()}  # unfinished
        assert left({"points": tenth}, runs) == []
        dead = tenth | {"critic/value_mean": [0.0] * 5}
        assert left({"points": dead}, runs) == ["critic/value_mean"]
        far = tenth | {"actor/approx_kl": [x + 1.5 for x in tenth["actor/approx_kl"]]}  # 4.5 times as much
        assert left({"points": far}, runs) == ["actor/approx_kl"]
