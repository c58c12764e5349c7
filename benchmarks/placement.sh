#!/usr/bin/env bash
# Actor and critic one after the other on both ranks, against both at once, each on a rank of its own (--critic-ranks 1):
# wall time of the update phase, and who was busy when. Two ranks, a thread each, runs in turn. They run a copy of
# ppo_llm.py with tests/forks/critic_ranks.patch applied, which adds that flag.
#   bash benchmarks/placement.sh [pairs of runs] [further flags]
set -euo pipefail
cd "$(dirname "$0")/.."
pairs=${1:-3}
shift || true
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1

cp ppo_llm.py "$folder"
git -C "$folder" apply "$PWD/tests/forks/critic_ranks.patch"
cat >"$folder/worker.py" <<'END'
"""ppo_llm.py, and in ranks.<rank>.jsonl of the run folder when the phases of each iteration began and ended."""
import itertools, json
import ppo_llm
log = ppo_llm.RunFolder.log
def log_times(run, *arguments):
    log(run, *arguments)
    clock = arguments[-1]
    times = [*itertools.accumulate(clock.phases.values(), initial=clock.started)]
    with open(run.path / f"ranks.{ppo_llm.RANK}.jsonl", "a") as file:
        print(json.dumps(times), file=file)
ppo_llm.RunFolder.log = log_times
ppo_llm.main()
END

# A random Llama of width 256 and 4 layers with the tokenizer of the embedded model: big enough for work to outweigh calls.
python - "$folder/model" <<'END'
import sys
import torch
sys.path.insert(0, ".")
import ppo_llm as ppo
args = ppo.Args(max_prompt_tokens=16, max_new_tokens=48)
tokenizer, actor = ppo.embedded_model(args, ppo.SortDigits())
raw = actor.config.raw | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32}
config = ppo.ModelConfig.from_hf(raw)
torch.manual_seed(0)
ppo.save_hf_checkpoint(ppo.Transformer(config), config, tokenizer, sys.argv[1])
END

run() { # name, flags
    torchrun --standalone --nproc-per-node 2 "$folder/worker.py" --model "$folder/model" --log-dir "$folder" --run-name "$1" --num-iterations 6 \
        --rollout-batch-size 64 --train-batch-size 32 --max-prompt-tokens 16 --max-new-tokens 48 --kl-coef 0 --eval-episodes 2 \
        --missing-eos-penalty 1 --save-every 0 "${@:2}" >"$folder/$1.txt" 2>&1 || { tail -30 "$folder/$1.txt"; exit 1; }
}
for i in $(seq "$pairs"); do
    run "serial$i" "$@"
    run "parallel$i" --critic-ranks 1 "$@"
done

python - "$folder" "$pairs" <<'END'
import json, os, platform, statistics, sys
import torch
folder, pairs = sys.argv[1], int(sys.argv[2])
cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
print(f"{cpu}, {os.cpu_count()} cores, 2 ranks of 1 thread, torch {torch.__version__}, Python {platform.python_version()}")
def rows(name):  # without the first iteration, which is slower
    return [json.loads(line) for line in open(f"{folder}/{name}/metrics.jsonl")][1:]
def times_of_ranks(name):  # of rank 0 and of rank 1, in each iteration
    ranks = [[json.loads(line) for line in open(f"{folder}/{name}/ranks.{rank}.jsonl")][1:] for rank in range(2)]
    return list(zip(*ranks))
def update(ranks):  # from the first rank that begins to the last that ends
    return max(times[4] for times in ranks) - min(times[2] for times in ranks)
medians = {kind: [statistics.median(map(update, times_of_ranks(f"{kind}{i + 1}"))) for i in range(pairs)] for kind in ("serial", "parallel")}
ratios = [p / s for s, p in zip(medians["serial"], medians["parallel"])]
print("\n| placement | update phase, s (median of iterations; each run) |\n|---|---|")
for kind, values in medians.items():
    print(f"| {kind} | {', '.join(f'{value:.2f}' for value in values)} |")
print(f"\nParallel / serial: {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})\n")
print("One iteration of each, seconds after the start of its rollout, and the time in which both ranks updated:\n")
print("| placement | rank | rollout | scoring | critic | actor | both busy |\n|---|---|---|---|---|---|---|")
for kind in medians:
    ranks = times_of_ranks(f"{kind}1")[2]
    updates = [(times[2], times[4]) for times in ranks]
    both = max(0, min(end for _, end in updates) - max(start for start, _ in updates))
    begin = min(times[0] for times in ranks)
    for rank, times in enumerate(ranks):
        spans = " | ".join(f"{start - begin:.2f} - {end - begin:.2f}" if end - start > 0.005 else "" for start, end in zip(times, times[1:5]))
        print(f"| {kind} | {rank} | {spans} | {both:.2f} |")
same = [abs(a[k] - b[k]) for a, b in zip(rows("serial1"), rows("parallel1")) for k in ("losses/policy_loss", "losses/value_loss", "objective/reward")]
print(f"\nLargest difference of losses and rewards between the two: {max(same):.1e}")
END
