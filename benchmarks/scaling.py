"""What an iteration costs as samples, response length, width of the model and ranks grow.

    python benchmarks/scaling.py              # CPU, one thread a rank, some minutes; draws benchmarks/scaling.png
    python benchmarks/scaling.py smoke        # less than a minute: does it run

Random Qwen2s, responses of forced length, float32. A point is the median of three iterations of a run after its first.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import torch
from common import ppo_llm

BASE = dict(samples=64, response=64, width=128, ranks=1)
SERIES = dict(samples=[32, 64, 128, 256], response=[32, 64, 128, 256, 512], width=[64, 128, 256, 512], ranks=[1, 2])
PROMPT = 32


def worker(samples: int, response: int, width: int, ranks: int) -> None:
    """A process of a run, whose numbers are in its metrics.jsonl."""
    tokenizer, folder = common.character_tokenizer(1024), os.environ["SCALING_FOLDER"]
    common.gym.register("Prompts-v0", entry_point=common.Prompts)
    prompts = json.dumps({"prompts": common.random_prompts(tokenizer, samples, PROMPT)})
    args = ppo_llm.Args(
        model=f"{folder}/model", env_id="Prompts-v0", env_kwargs=prompts, log_dir=folder, run_name="run", save_every=0,
        num_iterations=4, rollout_batch_size=samples, rollout_slots=samples, train_batch_size=samples // 4,
        kl_coef=0.01, max_prompt_tokens=PROMPT, max_new_tokens=response, eval_episodes=1, compile="off",
        device="cpu")  # fmt: skip
    with common.forced(ppo_llm, [response] * samples):
        ppo_llm.train(args)


def measure(**sizes) -> list[float]:
    """Seconds of rollout, scoring and updates, and the utilization of the updates, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        width, tokenizer = sizes["width"], common.character_tokenizer(1024)
        shape = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2, vocab_size=1024,
                     num_attention_heads=width // 32, num_key_value_heads=width // 32)  # fmt: skip
        common.write_checkpoint(f"{folder}/model", tokenizer, PROMPT + sizes["response"], shape)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(sizes["ranks"])]
        command = [sys.executable, *(launch if sizes["ranks"] > 1 else []), __file__, "worker", json.dumps(sizes)]
        environment = os.environ | {"SCALING_FOLDER": folder, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-3000:]
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()[1:]]
    runs = [[row["time/rollout"], row["time/score"], row["time/critic"] + row["time/actor"],
             100 * row["perf/update_mfu"]] for row in rows]  # fmt: skip
    return [statistics.median(column) for column in zip(*runs, strict=True)]


def plot(results: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
    for axis, name in zip(axes, ("samples", "response", "width"), strict=True):
        for i, phase in enumerate(("rollout", "scoring", "updates")):
            axis.loglog(SERIES[name], [results[name, x][i] for x in SERIES[name]], "o-", label=phase)
        axis.set(xlabel={"response": "response tokens"}.get(name, name), ylabel="seconds" if name == "samples" else "")
        axis.set_xticks(SERIES[name], SERIES[name], minor=False)
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["worker"]:
        return worker(**json.loads(sys.argv[2]))
    smoke, results = "smoke" in sys.argv, {}
    print(f"otherwise {', '.join(f'{name} {x}' for name, x in BASE.items())}; prompts of {PROMPT} tokens, 2 layers, "
          f"vocabulary 1024, 4 minibatches x 2 epochs; {common.hardware()}\n")  # fmt: skip
    common.table(["", "rollout, s", "scoring, s", "updates, s", "update MFU, %"])
    for name, values in SERIES.items():
        for x in values[:1] if smoke else values:
            sizes = BASE | (dict(width=256) if name == "ranks" else {}) | {name: x}
            sizes |= dict(samples=8, response=4, width=64) if smoke else {}
            results[name, x] = measure(**sizes)
            label = f"{name} {x}{', width 256' * (name == 'ranks')}"
            common.line([label, *(f"{value:.2f}" for value in results[name, x])])
    if not smoke:
        plot(results, Path(__file__).parent / "scaling.png")


if __name__ == "__main__":
    main()
