"""Peak resident memory of two ranks on the CPU after the start and after one small iteration: a random Llama, KL on.

    python benchmarks/start_memory.py [path of ppo_llm.py] [width]     # width 1280, the default, is 300 M parameters
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers
import transformers

SCRIPT = Path([*sys.argv[1:2], Path(__file__).parent.parent / "ppo_llm.py"][0]).resolve()
WIDTH = int(sys.argv[2]) if len(sys.argv) > 2 else 1280
FLAGS = "--num-iterations 1 --rollout-batch-size 2 --train-batch-size 2 --max-prompt-tokens 8 --max-new-tokens 8 " \
        "--kl-coef 0.1 --eval-episodes 2 --save-every 0 --device cpu --compile off"  # fmt: skip

ENVIRONMENT = """
import gymnasium as gym
from pathlib import Path

class Marks(gym.Env):
    def reset(self, *, seed=None, options=None):
        return "1+2=", {}

    def step(self, response):  # in the first rollout: all models have been built
        Path(__file__).with_name("built").touch()
        return "", 0.0, True, False, {}

gym.register("Marks-v0", entry_point=Marks)
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "marks.py").write_text(ENVIRONMENT)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.train_from_iterator(["0123456789+="], tokenizers.trainers.BpeTrainer(special_tokens=["<pad>", "<eos>"]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(f"{folder}/model")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=14, eos_token_id=1,
        num_attention_heads=WIDTH // 64, num_key_value_heads=WIDTH // 64, max_position_embeddings=64))  # fmt: skip
    print(f"{SCRIPT}: {model.num_parameters() / 1e6:.0f} M parameters", flush=True)
    model.save_pretrained(f"{folder}/model")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    flags = [*FLAGS.split(), "--env-id", "marks:Marks-v0", "--model", f"{folder}/model"]
    flags += ["--log-dir", folder, "--run-name", "run"]
    run = subprocess.Popen([*launch, *flags], env=os.environ | {"PYTHONPATH": folder})
    built, peaks = None, {}
    while run.poll() is None:
        for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
            status = Path(f"/proc/{child}/status")
            if found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else ""):
                peaks[child] = round(int(found[1]) / 1e6, 2)
        if built is None and Path(folder, "built").exists():
            built = list(peaks.values())
        time.sleep(0.02)
print(f"exit code {run.returncode}; peak resident memory, GB: {built} with all models, {[*peaks.values()]} in the end")
