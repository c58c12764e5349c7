"""Bad input: one line that names flag or file and value, exit code 2, no traceback, nothing left behind."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import environments
import huggingface_hub.constants
import pytest
import safetensors.torch
import torch

pytestmark = pytest.mark.shared

TINY = {"sft_steps": 0, "num_iterations": 2, "rollout_batch_size": 4, "train_batch_size": 4, "eval_episodes": 2}
GSM8K_LINE = json.dumps({"question": "1 + 1?", "answer": "It is two.\n#### 2"})


def train(ppo, tmp_path, **changes):
    return ppo.train(ppo.Args(log_dir=str(tmp_path / "runs"), **(TINY | {"device": "cpu"} | changes)))


def refuse(ppo, tmp_path, *parts, **changes):
    """`train` must raise a UserError of one line that contains `parts`, and leave no run folder."""
    with pytest.raises(ppo.UserError) as error:
        train(ppo, tmp_path, **changes)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


# --- The command line ---


def command(ppo, *flags):
    tiny = [f"--{name.replace('_', '-')}={value}" for name, value in (TINY | {"device": "cpu"}).items()]
    return [sys.executable, ppo.__file__, *tiny, "--log-dir=runs", *flags]


def environment():
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(ppo, cwd, *flags):
    """Exit code and the last line of what the command prints; a traceback is a failure."""
    done = subprocess.run(command(ppo, *flags), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) <= 1
    return done.returncode, errors[0] if errors else done.stderr


def test_command_line_with_an_unknown_flag(ppo, tmp_path):
    code, text = run(ppo, tmp_path, "--learning-rate", "0.1")
    assert code == 2 and "--learning-rate" in text and not (tmp_path / "runs").exists()


def test_command_line_with_a_value_out_of_range(ppo, tmp_path):
    code, text = run(ppo, tmp_path, "--gamma", "1.5")
    assert code == 2 and text.startswith("error: --gamma 1.5: must lie in [0, 1]") and not (tmp_path / "runs").exists()


def test_command_line_with_an_unknown_environment(ppo, tmp_path):
    code, text = run(ppo, tmp_path, "--env-id", "Nowhere-v0")
    assert code == 2 and text.startswith("error: --env-id Nowhere-v0") and not (tmp_path / "runs").exists()


def test_command_line_with_a_bad_jsonl_line(ppo, tmp_path):
    (tmp_path / "train.jsonl").write_text(f"{GSM8K_LINE}\n{GSM8K_LINE[:20]}\n")
    code, text = run(ppo, tmp_path, "--env-id", "GSM8K-v0", "--env-kwargs", '{"path": "train.jsonl"}')
    assert code == 2 and "train.jsonl, line 2" in text and not (tmp_path / "runs").exists()


def test_command_line_with_a_run_folder_that_exists(ppo, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    code, text = run(ppo, tmp_path, "--run-name", "mine")
    assert code == 2 and "--run-name" in text and "runs/mine" in text
    assert not any((tmp_path / "runs" / "mine").iterdir())


@pytest.mark.both
def test_command_line_with_a_reward_that_becomes_nan_during_training(ppo, tmp_path):
    """Seeds 6 and 7 belong to the second iteration of four prompts; the first answer that comes ends the run."""
    kwargs = '{"reward": NaN, "first": 6}'
    flags = ("--env-id", "environments:Constant-v0", "--env-kwargs", kwargs, "--run-name", "mine")
    code, text = run(ppo, tmp_path, *flags)
    assert code == 2
    assert "environment Constant-v0, sample " in text and "('', nan, " in text
    assert "2 with seed 6, prompt 'ab='" in text or "3 with seed 7, prompt 'fed='" in text
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["iterations"] == 1
    assert len((tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "iter_000001").is_dir()


@pytest.mark.both
def test_command_line_with_an_environment_that_hangs(ppo, tmp_path):
    started = time.monotonic()
    code, text = run(ppo, tmp_path, "--env-id", "environments:Hangs-v0", "--env-timeout", "1")
    assert code == 2 and "Hangs-v0" in text and "--env-timeout 1" in text and time.monotonic() - started < 40


@pytest.mark.both
def test_ctrl_c_ends_a_run_cleanly(ppo, tmp_path):
    flags = ("--run-name=mine", "--num-iterations=100000")
    process = subprocess.Popen(
        command(ppo, *flags), cwd=tmp_path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what runs behind `&`
    )
    metrics, deadline = tmp_path / "runs" / "mine" / "metrics.jsonl", time.monotonic() + 40
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    summary = json.loads((metrics.parent / "summary.json").read_text())
    assert summary["status"] == "interrupted" and len(rows) == summary["iterations"]
    assert (metrics.parent / "checkpoints" / f"iter_{len(rows):06d}").is_dir()


# --- Flags ---

AT_LEAST_1 = (
    "num_iterations rollout_batch_size n_samples_per_prompt rollout_slots max_prompt_tokens max_new_tokens "
    "sft_batch_size ppo_epochs critic_epochs train_batch_size micro_batch_tokens kl_horizon max_skipped_steps "
    "eval_episodes"
).split()
AT_LEAST_0 = (
    "seed sft_steps sft_lr actor_lr critic_lr entropy_coef kl_coef critic_warmup_iterations ref_sync_every "
    "missing_eos_penalty eval_every log_completions save_every critic_ranks"
).split()
ABOVE_0 = "temperature clip_high value_clip target_kl rollout_is_cap kl_target max_grad_norm env_timeout".split()
IN_0_TO_1 = "gamma gae_lambda lr_end ref_sync_alpha".split()
FLAGS = [
    *[(name, value) for name in AT_LEAST_1 for value in (0, -3)],
    *[(name, -1) for name in AT_LEAST_0],
    *[(name, value) for name in ABOVE_0 for value in (0.0, -0.5)],
    *[(name, value) for name in IN_0_TO_1 for value in (-0.1, 1.1)],
    *[(name, value) for name in ("actor_lr", "temperature", "gamma", "clip_low") for value in (math.nan, math.inf)],
    ("clip_low", 0.0), ("clip_low", 1.0), ("dual_clip", 1.0), ("seed", 2**70), ("keep_checkpoints", 1),
    ("num_iterations", 10**6),
    ("critic_ranks", 1), ("fsdp_shard_size", 0), ("fsdp_shard_size", 2), ("resume", "auto"),  # there is one process
    ("env_kwargs", "{path"), ("env_kwargs", "[1]"), ("eval_env_kwargs", "3"),
]


@pytest.mark.parametrize(("name", "value"), FLAGS)
def test_flag_out_of_range(ppo, tmp_path, name, value):
    refuse(ppo, tmp_path, f"--{name.replace('_', '-')} {value}", **{name: value})


@pytest.mark.parametrize("seed", [20240229, 2**31 - 1])
def test_seed_like_a_date_works(ppo, tmp_path, seed):
    assert train(ppo, tmp_path, seed=seed)["status"] == "completed"


@pytest.mark.parametrize(("flag", "changes"), [
    ("--kl-estimator k1", {"kl_in": "loss", "kl_estimator": "k1", "kl_coef": 0.1}),
    ("--kl-target 0.1", {"kl_target": 0.1}),
    ("--ref-sync-every 2", {"ref_sync_every": 2}),
    ("--rollout-is-cap 2.0", {"rollout_is_cap": 2.0, "recompute_old_logprobs": False}),
    ("--critic-warmup-iterations 3", {"critic_warmup_iterations": 3}),
])
def test_flags_that_contradict_each_other(ppo, tmp_path, flag, changes):
    refuse(ppo, tmp_path, flag, **changes)


def test_sizes_that_do_not_divide_name_the_nearest_that_do(ppo, tmp_path):
    sizes = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "train_batch_size": 7}
    refuse(ppo, tmp_path, "--train-batch-size 7", "24 samples", "6 or 8", **sizes)
    refuse(ppo, tmp_path, "--train-batch-size 25", "24", **sizes | {"train_batch_size": 25})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there(ppo, tmp_path):
    refuse(ppo, tmp_path, "--device cuda", device="cuda")


def test_log_dir_that_is_a_file(ppo, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for log_dir in ("file", "file/deeper"):
        with pytest.raises(ppo.UserError, match=rf"--log-dir \S*{log_dir}"):
            ppo.train(ppo.Args(log_dir=str(tmp_path / log_dir), device="cpu", **TINY))
    assert (tmp_path / "file").read_text() == "in the way"


def test_run_folder_of_a_finished_run_is_not_touched(ppo, tmp_path):
    train(ppo, tmp_path, run_name="mine")
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    with pytest.raises(ppo.UserError, match=r"--run-name.*mine exists"):
        train(ppo, tmp_path, run_name="mine")
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}


# --- Environments ---


@pytest.mark.parametrize(("env_id", "kwargs", "parts"), [
    ("SortDigit-v0", {}, []),
    ("no_such_module:Env-v0", {}, ["no_such_module"]),
    ("CartPole-v99", {}, []),
    ("SortDigits-v0", {"digit": 3}, ["digit"]),
    ("SortDigits-v0", {"digits": 0}, ["digits 0"]),
    ("SortDigits-v0", {"split": "validation"}, ["validation"]),
    ("GSM8K-v0", {}, ["path"]),
    ("environments:WrongSignature-v0", {}, ["extra"]),
])
def test_environment_that_cannot_be_made(ppo, tmp_path, env_id, kwargs, parts):
    refuse(ppo, tmp_path, f"--env-id {env_id}", *parts, env_id=env_id, env_kwargs=json.dumps(kwargs))


def test_evaluation_environment_that_cannot_be_made(ppo, tmp_path):
    refuse(ppo, tmp_path, "digits 0", eval_env_kwargs='{"digits": 0}')


@pytest.mark.parametrize(("attribute", "returns", "part"), [
    ("reset", ("prompt",), "reset() returned ('prompt',)"), ("reset", "prompt", "reset() returned 'prompt'"),
    ("reset", (b"prompt", {}), "reset() returned (b'prompt', {})"), ("reset", ("", {}), "0 tokens"),
])
def test_environment_whose_reset_is_wrong(ppo, tmp_path, monkeypatch, attribute, returns, part):
    monkeypatch.setattr(environments.TextEnv, attribute, lambda self, *, seed=None, options=None: returns)
    refuse(ppo, tmp_path, part, env_id="Plain-v0")


@pytest.mark.both
def test_prompt_that_is_too_long(ppo, tmp_path):
    refuse(ppo, tmp_path, "--max-prompt-tokens 2", "'ab='", "3 tokens", env_id="Plain-v0", max_prompt_tokens=2)


@pytest.mark.both
@pytest.mark.parametrize(("env", "part"), [
    ("RewardInf", "('', inf, "), ("RewardNone", "('', None, "), ("RewardString", "('', '1.0', "),
    ("Raises", "RuntimeError: the judge is out of order"), ("FourValues", "step() returned ('', 1.0, True, {})"),
])
def test_environment_that_fails_during_training(ppo, tmp_path, env, part):
    where = re.escape(f"environment {env}-v0, sample 0 with seed 0, prompt 'ab='")
    with pytest.raises(ppo.UserError, match=where) as error:
        train(ppo, tmp_path, env_id=f"{env}-v0", run_name="mine")
    assert part in str(error.value) and "\n" not in str(error.value)
    assert json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.both
def test_error_of_an_environment_with_several_lines_is_told_in_one(ppo, tmp_path, monkeypatch):
    def turn(self, response):
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(environments.Raises, "turn", turn)
    with pytest.raises(ppo.UserError, match="first line") as error:
        train(ppo, tmp_path, env_id="Raises-v0")
    assert "\n" not in str(error.value)


def test_a_demonstration_that_is_no_text(ppo, tmp_path, monkeypatch):
    monkeypatch.setattr(environments.TextEnv, "reset", lambda env, **kwargs: ("ab=", {"demonstration": None}))
    refuse(ppo, tmp_path, "environment Plain-v0", "info['demonstration'] must be text", env_id="Plain-v0")


# --- GSM8K's files ---


@pytest.mark.parametrize(("content", "parts"), [
    ("", ["is empty"]),
    ("\n\n", ["is empty"]),
    (GSM8K_LINE + "\n" + GSM8K_LINE[:-9], ["line 2"]),
    (GSM8K_LINE + "\n\n" + '{"prompt": "1 + 1?", "answer": "#### 2"}', ["line 3", "question"]),
    ('{"question": "1 + 1?", "response": "#### 2"}', ["line 1", "answer"]),
    ('{"question": "1 + 1?", "answer": 2}', ["line 1"]),
    ('["1 + 1?", "#### 2"]', ["line 1"]),
    (b'{"question": "caf\xe9", "answer": "#### 2"}', ["line 1", "UTF-8"]),
    (GSM8K_LINE.encode("utf-16"), ["line 1"]),
    (GSM8K_LINE + '\n{"question": "1 + 1?", "answer": "two"}', ["line 2", "####"]),
])
def test_gsm8k_file_that_is_wrong_names_path_and_line(ppo, tmp_path, content, parts):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    refuse(ppo, tmp_path, path, *parts, env_id="GSM8K-v0", env_kwargs=json.dumps({"path": str(path)}))


def test_gsm8k_file_that_cannot_be_read(ppo, tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        refuse(ppo, tmp_path, path, env_id="GSM8K-v0", env_kwargs=json.dumps({"path": str(path)}))


# --- Checkpoints ---


def checkpoint(ppo, path, edit=None, tensors=None, files=None, alphabet="0123456789=", **changes):
    """A small checkpoint; `changes` to config.json before its model is built, `edit` {key: value or None} afterwards.

    `tensors` changes the dict of tensors in place, `files` {name: text or None} writes or deletes files of the folder.
    """
    tokenizer = ppo.HFTokenizer.from_texts([alphabet])
    raw = {"model_type": "llama", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
           "num_attention_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1} | changes
    config = ppo.ModelConfig.from_hf(raw)
    ppo.save_hf_checkpoint(ppo.Transformer(config), config, tokenizer, path)
    if edit:
        raw = json.loads((path / "config.json").read_text()) | edit
        raw = {key: value for key, value in raw.items() if value is not None}
        (path / "config.json").write_text(json.dumps(raw))
    if tensors:
        state = safetensors.torch.load_file(path / "model.safetensors")
        tensors(state)
        safetensors.torch.save_file(state, path / "model.safetensors")
    for name, text in (files or {}).items():
        (path / name).unlink(missing_ok=True) if text is None else (path / name).write_text(text)
    return str(path)


@pytest.fixture
def refuse_model(ppo, tmp_path):
    def check(*parts, flag="model", **changes):
        model = checkpoint(ppo, tmp_path / "ckpt", **changes)
        sizes = {"max_prompt_tokens": 16, "max_new_tokens": 8, flag: model}
        refuse(ppo, tmp_path, *parts, **sizes)
    return check


def test_sound_checkpoint_trains(ppo, tmp_path):
    model = checkpoint(ppo, tmp_path / "ckpt")
    sizes = {"max_prompt_tokens": 16, "max_new_tokens": 8}
    assert train(ppo, tmp_path, model=model, critic_model=model, **sizes)["status"] == "completed"


def test_checkpoint_folder_that_is_missing(ppo, tmp_path):
    for flag in ("model", "critic_model", "reward_model"):
        refuse(ppo, tmp_path, f"--{flag.replace('_', '-')} {tmp_path / 'nowhere'}", **{flag: str(tmp_path / "nowhere")})


def test_hub_id_that_cannot_be_reached(ppo, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    refuse(ppo, tmp_path, "--model nobody/nothing", model="nobody/nothing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_checkpoint_file_that_is_missing(refuse_model, name):
    refuse_model(name, files={name: None})


@pytest.mark.parametrize("name", [
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json",
])
@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_json_file_of_a_checkpoint_that_is_corrupt(refuse_model, name, text):
    refuse_model(name, files={name: text})


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_weights_that_are_cut_short(ppo, tmp_path, keep):
    model = checkpoint(ppo, tmp_path / "ckpt")
    weights = tmp_path / "ckpt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refuse(ppo, tmp_path, weights, "corrupt", model=model, max_prompt_tokens=16, max_new_tokens=8)


def test_pickled_weights_are_not_read(ppo, tmp_path, refuse_model):
    class Pickled:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was unpickled",)

    (tmp_path / "ckpt").mkdir()
    torch.save({"model": Pickled()}, tmp_path / "pytorch_model.bin")
    weights = (tmp_path / "pytorch_model.bin").read_bytes()
    model = checkpoint(ppo, tmp_path / "ckpt", files={"model.safetensors": None})
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / "ckpt" / name).write_bytes(weights)
        refuse(ppo, tmp_path, "safetensors", model=model, max_prompt_tokens=16, max_new_tokens=8)
    assert not (tmp_path / "was unpickled").exists()


def test_shard_that_is_missing(refuse_model):
    index = json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
    refuse_model("model-00002-of-00002.safetensors", files={"model.safetensors.index.json": index})


def test_tensors_that_are_missing_extra_or_of_another_shape(refuse_model):
    norm = "model.layers.0.input_layernorm.weight"
    refuse_model(norm, "Missing", tensors=lambda state: state.pop(norm))
    add = lambda name: lambda state: state.update({name: torch.ones(3)})
    refuse_model("model.extra", "Unexpected", tensors=add("model.extra"))
    refuse_model(norm, "[3]", "[16]", tensors=add(norm))
    refuse_model(norm, flag="critic_model", tensors=lambda state: state.pop(norm))


@pytest.mark.parametrize(("key", "value"), [
    ("model_type", "gpt2"), ("model_type", None), ("hidden_act", "gelu"), ("use_sliding_window", True),
    ("rope_scaling", {"rope_type": "yarn"}), ("hidden_size", None), ("vocab_size", "many"), ("num_hidden_layers", 1.5),
])
def test_config_that_is_not_supported(refuse_model, key, value):
    refuse_model("config.json", *([value] if isinstance(value, str) and key != "vocab_size" else []), edit={key: value})


@pytest.mark.parametrize("flag", ["model", "critic_model"])
def test_tokenizer_larger_than_the_vocabulary(ppo, tmp_path, flag):
    small = checkpoint(ppo, tmp_path / "small", alphabet="0123456789=", vocab_size=13)
    changes = {"model": checkpoint(ppo, tmp_path / "sound"), flag: small, "max_prompt_tokens": 16, "max_new_tokens": 8}
    refuse(ppo, tmp_path, f"--{flag.replace('_', '-')}", "13", "14", **changes)


@pytest.mark.parametrize("template", [
    "{{ raise_exception('only users may speak') }}", "{% for %}", "{{ messages[7].content }}", "{{ undefined.field }}",
    "{{ messages | no_such_filter }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}",
])
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_that_does_not_render(refuse_model, place, template):
    config = json.dumps({"eos_token": "<eos>", "chat_template": template})
    refuse_model("ckpt", "chat template", files={place: template if place == "chat_template.jinja" else config})


def test_chat_template_that_only_fails_for_a_second_turn(refuse_model):
    template = "{% if messages[1] %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    refuse_model("chat template", "one turn only", files={"chat_template.jinja": template})


def test_no_eos_anywhere(refuse_model):
    refuse_model("ckpt", "eos", edit={"eos_token_id": None}, files={"tokenizer_config.json": "{}"})


def test_context_shorter_than_prompt_and_response(ppo, tmp_path):
    parts = ("--max-prompt-tokens 16 + --max-new-tokens 8", "23 tokens")
    sizes = {"max_prompt_tokens": 16, "max_new_tokens": 8}
    short = checkpoint(ppo, tmp_path / "short", max_position_embeddings=23)
    refuse(ppo, tmp_path, *parts, "--model", model=short, **sizes)
    sound = checkpoint(ppo, tmp_path / "sound", max_position_embeddings=24)
    refuse(ppo, tmp_path, *parts, "--critic-model", model=sound, critic_model=short, **sizes)


def test_reward_model_without_a_score_head(refuse_model):
    refuse_model("--reward-model", "score.weight", flag="reward_model")
