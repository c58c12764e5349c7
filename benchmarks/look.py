"""A page to look at a run: its curves, and what PPO computed for every token of a few samples.

    python benchmarks/look.py runs/mine             # writes runs/mine/page.html; open it in a browser
    python benchmarks/look.py runs/a runs/b         # the curves of both in each chart; writes runs/a/page.html
    python benchmarks/look.py runs/mine --watch     # writes the page again, every five seconds, until the run ends

The page is one file. It can be mailed or attached to an issue, and it reads nothing from the network. A run may still
go on, and runs of scripts that wrote no tokens.jsonl have their curves and texts. The folder of a run is enough, also
on a machine without PyTorch, since this file needs the standard library alone. What metrics, signs of trouble and
quantities mean is read from docs/reading_a_run.md, and the defaults of flags are read from the script.

The texts of a run come from a model, and nobody has checked them. They are data of the page, in JSON without the signs
that HTML gives a meaning, and look.html shows them as text only. The page's policy lets no script but its own run.
"""

import argparse
import ast
import base64
import hashlib
import html
import json
import math
import re
import shlex
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_suffix(".html")
MANUAL = ROOT / "docs" / "reading_a_run.md"
LARGEST = 12_000_000  # bytes of samples on a page
MOST_POINTS = 1000  # of a curve
SECONDS = 5  # between two pages of --watch
HIDDEN_FLAGS = "log_dir", "run_name", "resume", "wandb_project"  # They do not change what is computed.


# --- Files of a run


def read_lines(path: Path) -> list[dict]:
    """The rows of a .jsonl file. Damaged lines are left out, such as one that is being written."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line, parse_constant=str)
            row["iteration"] += 0
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            continue
    return rows


def read_json(path: Path) -> dict:
    """The content of a .json file, {} if it is missing or damaged."""
    try:
        return json.loads(path.read_text("utf-8"), parse_constant=str)
    except (OSError, ValueError):
        return {}


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of this run."""
    try:
        import fcntl  # Windows has none, but the folder may have been copied there.

        with open(folder / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # There is no such file, or there are no locks.
        pass
    return False


def read_samples(folder: Path, largest: int) -> tuple[dict[int, list[dict]], int]:
    """({iteration: samples}, n): the samples of every n-th iteration, so that they have at most `largest` bytes.

    A sample is a row of tokens.jsonl. Where that row is missing, it is the row of completions.jsonl.
    """
    samples = {}  # {iteration: {index in the rollout: sample}}
    for row in read_lines(folder / "completions.jsonl"):
        of_iteration = samples.setdefault(row.pop("iteration"), {})
        of_iteration[len(of_iteration)] = row | {"sample": len(of_iteration)}
    for row in read_lines(folder / "tokens.jsonl"):
        of_iteration = samples.setdefault(row.pop("iteration"), {})
        known = of_iteration.get(row["sample"], {})
        if "left_out" in row and "n_tokens" in known:  # The middle of a long sample is not in tokens.jsonl.
            row["n_tokens"] = known["n_tokens"]
        of_iteration[row["sample"]] = row
    lists = {i: list(of_iteration.values()) for i, of_iteration in sorted(samples.items())}
    size = len(json.dumps(lists))
    n = max(1, math.ceil(size / largest))
    return {i: rows for k, (i, rows) in enumerate(lists.items()) if k % n == 0 or k == len(lists) - 1}, n


# --- Flags


def defaults_of(script: Path) -> tuple[dict, dict]:
    """The defaults of Args, and the table DEFAULTS_BY_MODEL. The script is parsed, and not run."""
    fields, by_model = {}, {}
    for node in ast.parse(script.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            found = [x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.value, ast.Constant)]
            fields = {x.target.id: x.value.value for x in found}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULTS_BY_MODEL":
            by_model = ast.literal_eval(node.value)
    return fields, by_model


def changed_flags(args: dict, argv: list[str]) -> dict[str, tuple]:
    """{flag: (value, default)} of the flags that differ from the defaults. The default of a fork's flag is None.

    A flag whose default depends on the machine or on a model counts if it stands in the command.
    """
    defaults, by_model = defaults_of(ROOT / "ppo_llm.py")
    given = {re.sub(r"^--(no-)?|=.*", "", word).replace("-", "_") for word in argv if word.startswith("--")}
    changed = {}
    for name, value in args.items():
        default = defaults.get(name)
        if name in HIDDEN_FLAGS or ((default == "auto" or name == "critic_lr") and name not in given):
            continue
        if name in by_model:
            default = by_model[name][args.get("model") is not None]
        elif name == "critic_epochs":
            default = args.get("ppo_epochs")
        if value != default or name not in defaults:
            changed[name] = value, default
    return changed


# --- The manual


def plain(cell: str) -> str:
    """A cell of a table without the signs of Markdown."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("\\|", "|").replace("`", "").strip()


def manual_table(*columns: str) -> list[list[str]]:
    """The rows of the tables of the manual that have these columns, each a list of cells."""
    rows, inside = [], False
    for line in MANUAL.read_text("utf-8").splitlines() if MANUAL.is_file() else ():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        inside = (inside and bool(cells)) or cells == [*columns]
        if inside and cells != [*columns] and not set("".join(cells)) <= {"-"}:
            rows.append(cells)
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w/<>]+)`", cell)


def read_manual() -> dict:
    """What the page explains: metrics, signs of trouble, causes of a ratio of 1, quantities of tokens."""
    meanings, signs, causes, quantities = {}, {}, {}, []
    for names, meaning in manual_table("metric", "meaning"):
        meanings |= dict.fromkeys(names_in(names), plain(meaning))
    for sign, advice in manual_table("sign", "what to do"):
        for name in names_in(sign):
            signs.setdefault(name, []).append(f"{plain(sign)}: {plain(advice)}")
    for cause, meaning, advice, _ in manual_table("cause", "meaning", "what to do", "only in a fork?"):
        causes[plain(cause)] = plain(meaning), plain(advice)
    for name, key, meaning in manual_table("quantity", "key", "meaning"):
        quantities.append((plain(key), plain(name), plain(meaning)))
    return {"meanings": meanings, "signs": signs, "causes": causes, "quantities": quantities}


# --- Warnings


def spans(iterations: list[int]) -> str:
    """[0, 1, 2, 6] is "1 to 3, 7": iterations count from 1, as on the terminal."""
    parts = []
    for i in iterations:
        if parts and parts[-1][1] == i:
            parts[-1][1] = i + 1
        else:
            parts.append([i + 1, i + 1])
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in parts]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} further times" if len(shown) > 6 else "")


def warnings(rows: list[dict], args: dict, manual: dict) -> list[str]:
    """What the run has reported, and signs of trouble. The texts are those of the manual."""
    found = []
    for cause in sorted({row["ratio/diagnosis"] for row in rows if row.get("ratio/diagnosis")}):
        where = spans([row["iteration"] for row in rows if row.get("ratio/diagnosis") == cause])
        meaning, advice = manual["causes"].get(cause, ("", ""))
        found.append(f"ratio: {cause} in iteration {where}. {meaning}. What to do: {advice}.")
    bfloat16 = args.get("dtype") == "bfloat16"  # as in sampler_tolerance of the script
    gap = (0.1 if bfloat16 else 1e-4) / min(1.0, args.get("temperature") or 1.0)
    once = {"actor/skipped": 0, "critic/skipped": 0, "objective/unscored": 0, "debug/sampler_trainer_logprob_diff": gap}
    at_end = {"objective/truncated": 0.05, "actor/clipfrac": 0.3, "objective/special_tokens": 0.01}
    last = rows[-max(1, len(rows) // 10) :]
    for name, limit in (once | at_end).items():
        if name in once:
            above = [row["iteration"] for row in rows if (row.get(name) or 0.0) > limit]
            where = f"above {limit:g} in iteration {spans(above)}"
        else:
            mean = sum(row.get(name) or 0.0 for row in last) / max(1, len(last))
            above = mean > limit
            where = f"{mean:.3g} in the last {len(last)} iterations" if len(last) > 1 else f"{mean:.3g}"
        if above:
            texts = manual["signs"].get(name) or [f"It is the {manual['meanings'].get(name, '?')}"]
            found.append(f"{name} is {where}. {' '.join(texts)}.")
    return found


# --- The page


def rounded(x) -> float | None:
    return float(f"{x:.5g}") if isinstance(x, int | float) and math.isfinite(x) else None


def read_run(folder: Path, manual: dict, largest: int) -> dict:
    """All that the page shows of a run."""
    config, summary = read_json(folder / "config.json"), read_json(folder / "summary.json")
    if "args" not in config:
        raise SystemExit(f"{folder} has no config.json with the flags of a run: is it the folder of a run?")
    args, argv, rows = config["args"], config.get("argv", []), read_lines(folder / "metrics.jsonl")
    running = is_running(folder)
    samples, every = read_samples(folder, largest)
    done = rows[-1]["iteration"] + 1 if rows else 0
    if summary.get("iterations") != done:  # It is that of an earlier process, and the run has gone on since.
        summary = {}
    step = max(1, len(rows) // MOST_POINTS)
    points = [row for i, row in enumerate(rows) if i % step == 0 or row is rows[-1] or "eval/accuracy" in row]
    names = dict.fromkeys(name for row in points for name, x in row.items() if rounded(x) is not None)
    names.pop("iteration", None)
    # Of a running run the first evaluation stands in the first line of the metrics alone.
    first = rows[0] if rows and rows[0]["iteration"] == 0 else {}
    before = {name.removeprefix("eval/"): x for name, x in first.items() if name.startswith("eval/")}
    version = [f"script {config['script']}"] if "script" in config else []
    if "commit" in config:
        version.append(f"commit {config['commit']}" + (", changed since" if config.get("changed") else ""))
    return {
        "name": folder.resolve().name,
        "status": "running" if running else summary.get("status", "ended without a summary"),
        "command": shlex.join(map(str, argv)),
        "version": ", ".join(version),
        "args": args,
        "changed": changed_flags(args, argv),
        "done": done,
        "seconds": sum(row.get("time/iteration", 0) for row in rows),
        "before": summary.get("eval_before") or before,
        "after": None if running else summary.get("eval_after"),
        "iterations": [row["iteration"] for row in points],
        "metrics": {name: [rounded(row.get(name)) for row in points] for name in names},
        "samples": samples,
        "every": every,
        "warnings": warnings(rows, args, manual),
    }


def in_script(data: dict) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def make_page(folders: list[Path], watch: bool = False, largest: int = LARGEST) -> bytes:
    manual = read_manual()
    runs = [read_run(folder, manual, max(1, largest // len(folders))) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        for run, folder in zip(runs, folders, strict=True):
            run["name"] = str(folder)
    template = TEMPLATE.read_text("utf-8")
    parts = {"TITLE": html.escape(", ".join(run["name"] for run in runs))}
    parts["DATA"] = in_script({"runs": runs, "manual": manual, "watch": watch})
    # The policy allows the style and the script of the template, by their hashes, and nothing else.
    for kind, text in re.findall(r"(?s)<(style|script)>(.*?)</\1>", template):
        digest = hashlib.sha256(text.encode()).digest()
        parts[f"{kind.upper()}_HASH"] = f"'sha256-{base64.b64encode(digest).decode()}'"
    page = re.sub(r"__([A-Z_]+)__", lambda match: parts[match[1]], template)
    return page.encode("ascii", "xmlcharrefreplace")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the page; default: page.html in the first folder")
    parser.add_argument("--watch", action="store_true", help="write the page again until the runs have ended")
    parser.add_argument("--largest", type=int, default=LARGEST, help="bytes of samples on the page, at most")
    options = parser.parse_args()
    out = options.out or options.folders[0] / "page.html"
    goes_on = True
    while goes_on:
        goes_on = options.watch and any(map(is_running, options.folders))
        partial = out.with_name(f"{out.name}.partial")
        page = make_page(options.folders, goes_on, options.largest)
        try:
            partial.write_bytes(page)
            partial.replace(out)  # A browser never reads half a page.
        except OSError as error:
            parser.error(f"cannot write {out}: {error}")
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", flush=True)
        time.sleep(SECONDS if goes_on else 0)


if __name__ == "__main__":
    main()
