"""Bad input: one line that names flag, file or environment and what is wrong; exit code 2; no run is begun."""

import dataclasses
import json
import math
import sys
import types
from unittest import mock

import pytest
import safetensors.torch
import torch
from test_distributed import finish, flags_of, start
from test_train import SMALL, changed

pytestmark = pytest.mark.shared

GSM8K_LINE = json.dumps({"question": "1 + 1?", "answer": "It is two.\n#### 2"})
NORM = "model.layers.0.input_layernorm.weight"
SIZES = dict(max_prompt_tokens=16, max_new_tokens=8, actor_lr=1e-3, critic_lr=1e-3)


def refuse(ppo, tmp_path, *parts, begun=False, **flags):
    """`train` must raise a UserError, one line that contains `parts`, and leave no run folder unless it has `begun`."""
    flags = SMALL | dict(log_dir=str(tmp_path / "runs"), run_name="run") | flags
    with mock.patch.object(ppo, "SummaryWriter"), pytest.raises(ppo.UserError) as error:
        ppo.train(ppo.Args(**flags))
    message = str(error.value)
    assert "\n" not in message and [part for part in map(str, parts) if part not in message] == [], message
    assert (tmp_path / "runs").exists() == begun


FLAGS = {
    0: "num_iterations rollout_batch_size n_samples_per_prompt rollout_slots max_prompt_tokens max_new_tokens "
       "ppo_epochs train_batch_size micro_batch_tokens eval_episodes keep_checkpoints temperature "
       "clip_low clip_high value_clip target_kl max_grad_norm env_timeout rollout_is_cap",
    -1: "seed critic_epochs sft_steps sft_lr actor_lr critic_lr entropy_coef kl_coef critic_warmup_iterations "
        "ref_sync_every gamma missing_eos_penalty save_every adam_beta1",
    1.1: "gamma gae_lambda lr_end ref_sync_alpha clip_low adam_beta1", 1: "dual_clip adam_beta1",
    math.inf: "critic_lr", math.nan: "actor_lr temperature", 2**70: "seed",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for value in FLAGS for name in FLAGS[value].split()])
def test_flag_out_of_range(ppo, tmp_path, name, value):
    refuse(ppo, tmp_path, f"--{name.replace('_', '-')} {value}", **{name: value})


@pytest.mark.parametrize(("parts", "flags"), [
    (["--resume auto", "--run-name"], dict(resume="auto", run_name=None)),
    (["--kl-estimator k1"], dict(kl_in="loss", kl_estimator="k1", kl_coef=0.1)),
    (["--ref-sync-every", "--kl-coef"], dict(ref_sync_every=2)),
    (["--critic-warmup-iterations", "--critic-epochs"], dict(critic_warmup_iterations=1, critic_epochs=0)),
    (["--rollout-is-cap", "--recompute-old-logprobs"], dict(rollout_is_cap=2.0, recompute_old_logprobs=False)),
    (["--train-batch-size 7", "24 samples"], dict(rollout_batch_size=6, n_samples_per_prompt=4, train_batch_size=7)),
    (["--log-dir", __file__], dict(log_dir=__file__)),  # a file
])  # fmt: skip
def test_flags_that_contradict_each_other_or_the_disk(ppo, tmp_path, parts, flags):
    refuse(ppo, tmp_path, *parts, **flags)


@pytest.mark.parametrize(("environment", "part"), [
    (dict(RANK="1"), "RANK without LOCAL_RANK"),
    (dict(RANK="2", LOCAL_RANK="2"), "there are 2 GPUs, none for local rank 2"),
])  # fmt: skip
def test_every_rank_needs_a_gpu_of_its_own(ppo, monkeypatch, environment, part):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 2):
        with pytest.raises(ppo.UserError, match=part):
            ppo.connect(ppo.Args())


def test_main_prints_one_line_and_exits_with_code_two(ppo, tmp_path, capsys):
    for flags, part in ((dict(gamma=1.5), "--gamma 1.5"), (dict(env_id="environments:Raises-v0"), "out of order")):
        argv, patch = [ppo.__file__, *flags_of(log_dir=tmp_path, **flags)], mock.patch.object
        with patch(sys, "argv", argv), patch(ppo, "SummaryWriter"), pytest.raises(SystemExit) as end:
            ppo.main()
        [error] = [line for line in capsys.readouterr().err.splitlines() if "error" in line.lower()]
        assert end.value.code == 2 and error.startswith("error: ") and part in error


@pytest.mark.parametrize(("env_id", "kwargs", "part"), [
    ("SortDigit-v0", {}, "SortDigit"), ("no_such_module:Env-v0", {}, "no_such_module"), ("GSM8K-v0", {}, "path"),
    ("SortDigits-v0", {"split": "validation"}, "validation"), ("SortDigits-v0", [1], "[1]"), ("SortDigits-v0", 3, "3"),
])  # fmt: skip
def test_environment_that_cannot_be_made(ppo, tmp_path, env_id, kwargs, part):
    refuse(ppo, tmp_path, f"--env-id {env_id}", part, env_id=env_id, env_kwargs=json.dumps(kwargs))
    refuse(ppo, tmp_path, f"--env-id {env_id}", part, env_id=env_id, eval_env_kwargs=json.dumps(kwargs))


@pytest.mark.parametrize(("returns", "part"), [
    (("prompt",), "reset() returned ('prompt',)"), ("prompt", "reset() returned 'prompt'"),
    ((b"prompt", {}), "reset() returned (b'prompt', {})"), (("", {}), "0 tokens"), (("abcd" * 5, {}), "20 tokens"),
])  # fmt: skip
def test_environment_whose_prompts_are_malformed_or_too_long(ppo, tmp_path, returns, part):
    with mock.patch("environments.TextEnv.reset", lambda self, *, seed=None, options=None: returns):
        refuse(ppo, tmp_path, part)


@pytest.mark.both
@pytest.mark.parametrize(("env", "part"), [
    ("RewardNaN", "('', nan, "), ("RewardInf", "('', inf, "), ("RewardNone", "('', None, "),
    ("RewardString", "('', '1.0', "), ("Raises", "RuntimeError: the judge is out of order (/"),
    ("FourValues", "step() returned ('', 1.0, True, {})"), ("WrongSignature", "TypeError"),
    ("Hangs", "step() gave no answer within --env-timeout 1 s"),
])  # fmt: skip
def test_environment_that_fails_is_named_with_sample_and_prompt(ppo, tmp_path, env, part):
    where = f"environment {env}-v0, sample 0, seed 0, prompt 'ab='"
    refuse(ppo, tmp_path, where, part, begun=True, env_id=f"environments:{env}-v0", env_timeout=1.0)
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_bug_of_an_environment_is_found(ppo, tmp_path):
    """By the traceback of its constructor, and by the line of its method."""
    run = lambda: ppo.train(ppo.Args(**SMALL | dict(log_dir=str(tmp_path))))
    with mock.patch("environments.TextEnv.__init__", lambda self: self.missing, create=True):
        with pytest.raises(AttributeError, match="missing"):
            run()
    namespace = {}
    exec(compile("def reset(self, *, seed=None, options=None):\n    return 1 / 0\n", "/x/raises.py", "exec"), namespace)
    with mock.patch("environments.TextEnv.reset", namespace["reset"]):
        with pytest.raises(ppo.UserError, match=r"ZeroDivisionError: division by zero \(/x/raises\.py, line 2\)"):
            run()


@pytest.mark.slow
def test_a_hung_environment_does_not_keep_the_process_alive(ppo, tmp_path):
    argv = flags_of(env_id="environments:Hangs-v0", env_timeout=0.5)
    code, output = finish(start([sys.executable, ppo.__file__, *argv], tmp_path), timeout=60)
    assert code == 2 and "Traceback" not in output and "--env-timeout 0.5 s" in output, output


@pytest.mark.parametrize(("content", "parts"), [
    (GSM8K_LINE + "\n" + GSM8K_LINE[:-9], ["line 2"]), ('["1 + 1?", "#### 2"]', ["line 1"]), (None, []),
    (GSM8K_LINE + '\n{"prompt": "1 + 1?", "answer": "#### 2"}', ["line 2", "question"]), ("", ["no rows"]),
    ('{"question": "1 + 1?", "answer": "two"}', ["line 1", "####"]), ('{"question": "caf\xe9"}', ["line 1", "utf-8"]),
])  # fmt: skip
def test_gsm8k_file_that_is_wrong_is_named_with_the_line(ppo, tmp_path, content, parts):
    path = tmp_path / "train.jsonl"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    refuse(ppo, tmp_path, path, *parts, env_id="GSM8K-v0", env_kwargs=json.dumps({"path": str(path)}))


PROMPT = '{"prompt": "ab="}'
NOT_TEXT = "prompt and demonstration must be text"


def messages(*roles, content="ab="):
    return json.dumps({"messages": [{"role": role, "content": content} for role in roles]})


@pytest.mark.parametrize(("content", "parts"), [
    (f"{PROMPT}\n{PROMPT[:-1]}", ["line 2"]), (f"{PROMPT}\n\n{PROMPT}", ["line 2"]), ("", ["no rows"]), (None, []),
    (f'{PROMPT}\n{{"text": "ab="}}', ["line 2", "'prompt'"]), ('["prompt"]', ["line 1"]), ("5", ["line 1"]),
    ('{"prompt": 5}', ["line 1", NOT_TEXT]), (f'{PROMPT}\n{{"prompt": "x", "demonstration": 5}}', ["line 2", NOT_TEXT]),
    (messages("user") + "\n" + messages("user", content=[{"type": "text"}]), ["line 2", NOT_TEXT]),
    (f'{PROMPT}\n{{"prompt": "\\ud83d"}}', ["line 2", "surrogates"]),
    *[(f"{PROMPT}\n{messages(*roles)}", ["line 2", "messages must be a single one, with the role user"])
      for roles in ([], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant"], ["assistant"])],
])  # fmt: skip
def test_prompts_file_that_is_wrong_is_named_with_the_line(ppo, tmp_path, content, parts):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    refuse(ppo, tmp_path, path, *parts, env_id="Prompts-v0", env_kwargs=json.dumps({"path": str(path)}))


def prompts(tmp_path, reward, *lines):
    """Flags for Prompts-v0 with these lines."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines or [PROMPT]))
    kwargs = {"path": str(tmp_path / "prompts.jsonl"), "reward": reward}
    return dict(env_id="Prompts-v0", env_kwargs=json.dumps(kwargs), env_timeout=1.0)


@pytest.mark.parametrize(("reward", "part"), [
    ("no_such_module:reward", "No module named 'no_such_module'"), ("environments:rewrad", "no attribute 'rewrad'"),
    ("environments", "not a function"), ("environments:TextEnv.prompts", "not a function"), (5, "TypeError"),
])  # fmt: skip
def test_reward_function_that_cannot_be_imported(ppo, tmp_path, reward, part):
    refuse(ppo, tmp_path, f"cannot import the reward function {reward}: ", part, **prompts(tmp_path, reward))


@pytest.mark.parametrize(("body", "part"), [
    ("return 1 / 0", "step() raised ZeroDivisionError: division by zero (/x/judge.py, line 2)"),
    ("return float('nan')", "step() returned ('', nan, "), ("pass", "step() returned ('', None, "),
    ("return '1.0'", "step() returned ('', '1.0', "), ("return [1.0, True]", "step() returned ('', [1.0, True], "),
    ("return float('inf'), True", "step() returned ('', inf, "),
    ("return 10 ** 400", "step() returned ('', 1000"),  # no float
    ("return 1.0, True, 2", "step() returned ('', (1.0, True, 2), "),
    ("import time; time.sleep(20)", "step() gave no answer within --env-timeout 1 s"),
    ("import multiprocessing; raise multiprocessing.TimeoutError('compiler')",  # its own, and not that of --env-timeout
     "step() raised TimeoutError: compiler (/x/judge.py, line 2)"),
])  # fmt: skip
def test_reward_function_that_fails_is_named_with_sample_and_prompt(ppo, tmp_path, monkeypatch, body, part):
    judge = types.ModuleType("judge")
    exec(compile(f"def reward(prompt, response, row):\n    {body}\n", "/x/judge.py", "exec"), vars(judge))
    monkeypatch.setitem(sys.modules, "judge", judge)
    where = "environment Prompts-v0, sample 0, seed 0, prompt 'ab='"
    refuse(ppo, tmp_path, where, part, begun=True, **prompts(tmp_path, "judge:reward"))


def test_row_without_a_demonstration_among_others_that_have_one(ppo, tmp_path):
    flags = prompts(tmp_path, None, PROMPT, '{"prompt": "x=", "demonstration": "x"}')
    refuse(ppo, tmp_path, "prompt 'ab='", "'demonstration'", sft_steps=1, **flags)


def model_folder(ppo, path, edit=None, tensors=None, head="lm", letters="abcdefxy=", template=None, **changes):
    """A small model; `changes` to config.json before it is built, `edit` afterwards; `tensors` replaces some."""
    raw = {"model_type": "llama", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
           "num_attention_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1} | changes  # fmt: skip
    config = ppo.ModelConfig.from_hf(raw)
    tokenizer = ppo.HFTokenizer.from_texts([letters])
    tokenizer.hf.chat_template = template
    ppo.save_hf_checkpoint(ppo.Transformer(config, head), tokenizer, path)
    (path / "config.json").write_text(json.dumps(raw | (edit or {})))
    state = safetensors.torch.load_file(path / "model.safetensors") | (tensors or {})
    state = {name: x for name, x in state.items() if x is not None}
    safetensors.torch.save_file(state, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("parts", "changes"), [
    (["model.extra"], dict(tensors={"model.extra": torch.ones(3)})),
    (["gpt2", "qwen2"], dict(edit={"model_type": "gpt2", "num_attention_heads": None})),
    (["sliding"], dict(edit={"use_sliding_window": True})),
    (["partial_rotary_factor"], dict(edit={"partial_rotary_factor": 0.5})),
    (["yarn"], dict(edit={"rope_parameters": {"rope_type": "yarn"}})), (["gelu"], dict(edit={"hidden_act": "gelu"})),
    (["11", "12"], dict(vocab_size=11)),  # the tokenizer has 12
    (["23", "24"], dict(max_position_embeddings=23)),  # prompt and response: 16 + 8 tokens
])  # fmt: skip
def test_model_that_does_not_fit(ppo, tmp_path, parts, changes):
    path = model_folder(ppo, tmp_path / "model", **changes)
    refuse(ppo, tmp_path, path, *parts, model=str(path), **SIZES)


def test_mistakes_of_forks_are_refused_and_their_flags_pass(ppo, tmp_path):
    fewer = lambda batch: dataclasses.replace(batch, mask=batch.mask & (batch.rewards == 0))
    with mock.patch.object(ppo, "rollout", changed(ppo.rollout, fewer)):
        refuse(ppo, tmp_path, "rewards of tokens outside the mask", begun=True)
    shaped = lambda batch: dataclasses.replace(batch, rewards=batch.rewards / (batch.rewards != 0))
    with mock.patch.object(ppo, "rollout", changed(ppo.rollout, shaped)):
        refuse(ppo, tmp_path, "a reward, or its penalty for the KL, is not finite", begun=True, run_name="nan")
    twice = lambda batch: dataclasses.replace(batch, stats={"objective/reward": 1.0})
    with mock.patch.object(ppo, "rollout", changed(ppo.rollout, twice)):
        refuse(ppo, tmp_path, "objective/reward is the name of another metric", begun=True, run_name="twice")
    mean = dataclasses.field(default_factory=lambda: torch.zeros(2))
    state = dataclasses.make_dataclass("TrainState", [("mean", torch.Tensor, mean)], bases=(ppo.TrainState,))
    with mock.patch.object(ppo, "TrainState", state):
        refuse(ppo, tmp_path, "cannot save TrainState: TypeError: Object of type Tensor", begun=True, run_name="state")
    rates = dataclasses.field(default_factory=lambda: {7: 0.5})  # with keys that a resumed run would not find
    state = dataclasses.make_dataclass("TrainState", [("rates", dict, rates)], bases=(ppo.TrainState,))
    with mock.patch.object(ppo, "TrainState", state):
        refuse(ppo, tmp_path, "cannot save TrainState: ValueError: JSON changes rates", begun=True, run_name="keys")
    with pytest.raises(ppo.UserError, match="3 samples selected: must be 270"):
        ppo.select(None, [0, 1, 2], ppo.validate(ppo.Args(rollout_batch_size=270, train_batch_size=27)))
    fork = dataclasses.make_dataclass("Fork", [("threshold", float, -1.0)], bases=(ppo.Args,))
    ppo.validate(fork())
