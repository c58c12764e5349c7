#!/usr/bin/env bash
# The default task for five seeds, one after the other: accuracy on held-out prompts before and after PPO, time.
#   bash benchmarks/default_task.sh [script.py] [further flags]
set -euo pipefail
cd "$(dirname "$0")/.."
script=${1:-ppo_llm.py}
shift || true
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for seed in 1 2 3 4 5; do
    start=$(date +%s.%N)
    python "$script" --seed "$seed" --log-dir "$folder" --run-name "$seed" "$@" >"$folder/$seed.txt" 2>&1 || { tail "$folder/$seed.txt"; exit 1; }
    echo "$(date +%s.%N) - $start" | python -c 'a, _, b = input().split(); print(float(a) - float(b))' >"$folder/$seed/wall"
done
python - "$folder" <<'END'
import json, os, platform, sys
import torch
cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
print(f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}\n")
print("| seed | sampled before | sampled after | greedy before | greedy after | whole command, s |")
print("|---|---|---|---|---|---|")
for seed in range(1, 6):
    folder = f"{sys.argv[1]}/{seed}"
    s, wall = json.load(open(f"{folder}/summary.json")), float(open(f"{folder}/wall").read())
    b, a = s["eval_before"], s["eval_after"]
    print(f"| {seed} | {b['accuracy']:.1%} | {a['accuracy']:.1%} | {b['greedy_accuracy']:.1%} | {a['greedy_accuracy']:.1%} "
          f"| {wall:.0f} |")
END
