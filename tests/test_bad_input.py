"""Bad input: one line that names flag, file or environment and what is wrong; exit code 2."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import signal
import sys
import types
from unittest import mock

import environments
import pytest
import torch
from test_distributed import finish, flags_of, start
from test_train import SMALL, changed, lines, record

pytestmark = pytest.mark.shared

GSM8K_LINE = json.dumps({"question": "1 + 1?", "answer": "It is two.\n#### 2"})
PROMPT = '{"prompt": "ab="}'
MESSAGES = lambda *roles, text="ab=": json.dumps({"messages": [{"role": role, "content": text} for role in roles]})


def refuse(ppo, tmp_path, *parts, begun=False, **flags):
    """`train` must raise a UserError that contains `parts`; there is a run folder only if it has `begun`."""
    flags = SMALL | dict(log_dir=str(tmp_path / "runs"), run_name="run") | flags
    with mock.patch.object(ppo, "SummaryWriter"), pytest.raises(ppo.UserError) as error:
        ppo.train(ppo.Args(**flags))
    message = str(error.value)
    assert [part for part in map(str, parts) if part not in message] == [], message
    assert (tmp_path / "runs").exists() == begun


def main(ppo):
    with mock.patch.object(ppo.time, "sleep"), mock.patch.object(ppo.dist, "destroy_process_group"):
        ppo.main()


def test_numbers_that_are_negative_too_large_or_none(ppo, tmp_path):
    numbers = [field.name for field in dataclasses.fields(ppo.Args) if re.match("int|float", field.type)]
    assert len(numbers) > 30
    others = [("seed", 2**31), ("critic_lr", math.inf), ("gamma", math.nan)]
    above_one = [(name, 1.5) for name in ppo.AT_MOST_ONE]
    for name, value in [*((name, -1) for name in numbers), *others, *above_one]:
        highest = 1 if name in ppo.AT_MOST_ONE else 2147483647
        refuse(ppo, tmp_path, f"--{name.replace('_', '-')} {value}: must be from 0 to {highest}", **{name: value})


@pytest.mark.parametrize(("flags", "parts"), [
    (dict(train_batch_size=0), ["--train-batch-size 0: must be above 0"]),
    (dict(temperature=0.0), ["--temperature 0.0: must be above 0"]),
    (dict(max_grad_norm=0.0), ["--max-grad-norm 0.0: must be above 0"]),  # It does not turn clipping off.
    (dict(dual_clip=1.0), ["--dual-clip 1.0: must be above 1"]),
    (dict(kl_loss="k3", kl_coef=0.0), ["--kl-loss k3", "--kl-coef"]),
    (dict(resume="auto", run_name=None), ["--resume auto", "--run-name"]),
    (dict(resume="runs/missing"), ["cannot resume from /", "/runs/missing"]),
    (dict(critic_epochs=0, critic_warmup_iterations=1), ["--critic-epochs", "--critic-warmup-iterations"]),
    (dict(rollout_batch_size=6, n_samples_per_prompt=4, train_batch_size=7), ["--train-batch-size 7", "24 samples"]),
    (dict(log_dir=__file__), [f"cannot write {__file__}"]),
    *[(dict(device="cuda"), ["cannot use --device cuda: "])][torch.cuda.is_available() :],
])  # fmt: skip
def test_flags_that_contradict_each_other_or_the_disk(ppo, tmp_path, flags, parts):
    refuse(ppo, tmp_path, *parts, **flags)


@pytest.mark.parametrize(("flags", "part", "has_traceback"), [
    (dict(gamma=-1), "--gamma -1.0", False),
    (dict(env_id="environments:Raises-v0"), "out of order", True),
    (dict(env_id="environments:Unmade-v0"), "nope", True),
    (dict(env_id="imports_what_is_not_there:X-v0"), "No module named 'not_there'", True),
    (dict(env_id="No-Such-v0"), "NameNotFound: Environment `No-Such` doesn't exist", False),
    (dict(env_id="no_such_module:X-v0"), "No module named 'no_such_module'", False),
    (dict(env_id="environments:Plain-v0", env_kwargs='{"split": "train"}'), "TypeError", False),
    (dict(env_id="environments:FourValues-v0"), "TypeError: step must return a tuple", False),
    (dict(env_id="environments:RewardNaN-v0"), "must be a finite number, not nan", False),
])  # fmt: skip
def test_main_prints_one_line_and_before_it_the_traceback_if_there_is_code_of_the_user_in_it(
        ppo, tmp_path, monkeypatch, capsys, flags, part, has_traceback):  # fmt: skip
    (tmp_path / "imports_what_is_not_there.py").write_text("import not_there")
    monkeypatch.chdir(tmp_path)  # where modules of the user may be
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [ppo.__file__, *flags_of(log_dir=tmp_path, **flags)])
    with mock.patch.object(ppo, "SummaryWriter"), pytest.raises(SystemExit) as end:
        main(ppo)
    *before, last = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and last.startswith("error: ") and part in last
    users = [line for line in before if "environments.py" in line or "not_there.py" in line]
    assert bool(users) == has_traceback == any("Traceback" in line for line in before)


def test_help_shows_the_defaults_that_depend_on_the_model(ppo, capsys):
    with mock.patch.object(sys, "argv", [ppo.__file__, "--help"]), pytest.raises(SystemExit):
        main(ppo)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())  # without the frame, which tyro may draw
    for without, with_model in ppo.DEFAULTS_BY_MODEL.values():
        shown = f"default: {with_model:g} if --model is given, else {without:g}"
        assert shown.replace("e-0", "e-").replace("0.0005", "5e-4") in text


def test_ctrl_c_is_no_error_of_the_user(ppo):
    with pytest.raises(KeyboardInterrupt), ppo.attempt("load a model"):
        raise KeyboardInterrupt


@pytest.mark.both
def test_environments_are_closed_and_signals_given_back_at_every_end(ppo, tmp_path):
    handlers = [signal.signal(number, signal.SIG_DFL) for number in ppo.SIGNALS]
    serves = dict(env_id="environments:Serves-v0", num_iterations=1)
    refuse(ppo, tmp_path, "judge is out", begun=True, **serves, env_kwargs='{"error": "the judge is out"}')
    with mock.patch.object(ppo, "SummaryWriter", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        record(ppo, tmp_path / "stopped", tensorboard=True, **serves)
    assert record(ppo, tmp_path, **serves).summary["status"] == "completed"
    assert environments.OPEN == []
    given_back = [signal.signal(*pair) for pair in zip(ppo.SIGNALS, handlers)]
    assert given_back == [signal.SIG_DFL] * len(handlers)


def test_user_code_may_switch_gradients_off_and_its_threads_compute_none(ppo, tmp_path):
    seen = record(ppo, tmp_path, env_id="environments:Meddles-v0")
    assert [row["objective/reward"] for row in seen.rows] == [1, 1] and torch.is_grad_enabled()


def test_stdout_may_be_replaced_or_closed(ppo, tmp_path):
    closed, streams = io.StringIO(), [None, io.StringIO()]
    closed.close()
    for i, stream in enumerate([*streams, closed]):
        argv = [ppo.__file__, *flags_of(log_dir=tmp_path, run_name=i, num_iterations=1)]
        with mock.patch.multiple(sys, argv=argv, stdout=stream), mock.patch.object(ppo, "SummaryWriter"):
            main(ppo)
        assert len(lines(tmp_path / str(i))) == 1
    assert "1/1: reward" in streams[1].getvalue()


@contextlib.contextmanager
def printed_in(encoding):
    """What is printed in this encoding; the text is in the list when the context ends."""
    stdout, printed = io.TextIOWrapper(io.BytesIO(), encoding=encoding), []
    with mock.patch.object(sys, "stdout", stdout):
        yield printed
    printed.append(stdout.buffer.getvalue().decode(encoding))


@pytest.mark.parametrize(("encoding", "letters", "shown"), [
    ("ascii", "\xe9\u4e2d", r"\xe9\u4e2d"), ("latin-1", "\xe9\u4e2d", "\xe9" + r"\u4e2d"),
    ("utf-8", "\xe9\u4e2d", "\xe9\u4e2d"), ("utf-8", "\udcc3", r"\udcc3"),  # in names whose bytes are no UTF-8
])  # fmt: skip
def test_letters_that_stdout_lacks_are_replaced(ppo, encoding, letters, shown):
    with printed_in(encoding) as printed:
        ppo.print0(f"saved runs/{letters}")
    assert printed == [f"saved runs/{shown}\n"]


def test_no_line_of_a_run_is_lost_where_stdout_is_not_utf_8(ppo, tmp_path):
    """As in containers without a locale (Megvii-BaseDetection/YOLOX#220)."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "\xe9="}))
    kwargs = json.dumps({"path": str(tmp_path / "rows.jsonl"), "reward": "environments:length"})
    with printed_in("ascii") as printed:
        record(ppo, tmp_path, env_id="Prompts-v0", env_kwargs=kwargs, run_name="r\xe9", num_iterations=1, save_every=1)
    lines = printed[0].splitlines()
    assert rf"saved {tmp_path}/r\xe9/checkpoints/iter_000001" in lines and any(r"['\xe9='" in line for line in lines)
    assert any(line.startswith("  rewards    Prompts-v0") for line in lines)


@pytest.mark.slow
def test_an_error_whose_letters_stderr_lacks_is_not_lost(ppo, tmp_path):
    command = ["env", "PYTHONIOENCODING=ascii", sys.executable, ppo.__file__, *flags_of(log_dir="/dev/null/r\xe9")]
    code, output = finish(start(command, tmp_path), timeout=240)
    assert code == 2 and r"error: cannot write /dev/null/r\xe9/run" in output, output


@pytest.mark.parametrize("flag", ["env_kwargs", "eval_env_kwargs"])
def test_a_prompt_of_a_file_that_is_too_long_is_found_before_the_run(ppo, tmp_path, flag):
    kwargs = {}
    for name, prompt in ("short", "ab="), ("long", "ab" * 8 + "="):
        (tmp_path / name).write_text("\n".join([PROMPT] * 9 + [json.dumps({"prompt": prompt})]))
        kwargs[name] = json.dumps({"path": str(tmp_path / name), "reward": "environments:length"})
    flags = dict(env_kwargs=kwargs["short"]) | {flag: kwargs["long"]}
    refuse(ppo, tmp_path, "--max-prompt-tokens 16: the prompt 'abab", env_id="Prompts-v0", num_iterations=0, **flags)


def test_a_prompt_of_several_messages_that_is_too_long_has_the_tokens_of_all(ppo):
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": "de"}]
    env = types.SimpleNamespace(reset=lambda seed: (messages, {}))
    with pytest.raises(ppo.UserError, match="--max-prompt-tokens 4: the prompt 'de' has 5 tokens"):
        ppo.Episode(0).begin(env, ppo.HFTokenizer.from_texts(["abcde"]), ppo.Args(max_prompt_tokens=4))


@pytest.mark.parametrize(("env_id", "kwargs", "part"), [
    ("SortDigit-v0", "{}", "SortDigit"), ("no_such_module:Env-v0", "{}", "no_such_module"), ("GSM8K-v0", "{}", "path"),
    ("SortDigits-v0", '{"split": "train"}', "split"), ("SortDigits-v0", "[1]", "[1]"), ("SortDigits-v0", "{5}", "JSON"),
])  # fmt: skip
def test_environment_that_cannot_be_made(ppo, tmp_path, env_id, kwargs, part):
    refuse(ppo, tmp_path, f"--env-id {env_id}", part, env_id=env_id, env_kwargs=kwargs)
    refuse(ppo, tmp_path, f"--env-id {env_id}", part, env_id=env_id, eval_env_kwargs=kwargs)


@pytest.mark.parametrize(("returns", "begun", "part"), [
    (("prompt",), False, "cannot reset the environment with seed 0"),
    *[((prompt, {}), False, f"with seed 0: {error}") for prompt, error in [
        (b"ab=", "TypeError"), (None, "TypeError"), (5, "TypeError"), ({"role": "user", "content": "a"}, "TypeError"),
        ([{"role": "user"}], "KeyError: 'content'"),
        ([{"role": "user", "content": 5}], "TypeError: {'role': 'user', 'content': 5}: role and content must be")]],
    (([{"role": "assistant", "content": "a"}], {}), False, "with seed 0: ValueError: there must be a message"),
    (("", {}), True, "the prompt '' has 0 tokens"),
    (("abcd" * 5, {}), True, "--max-prompt-tokens 16: the prompt 'abcdabcdabcdabcdabcd' has 20 tokens"),
])  # fmt: skip
def test_environment_whose_prompts_are_malformed_or_too_long(ppo, tmp_path, returns, begun, part):
    with mock.patch("environments.TextEnv.reset", lambda self, *, seed=None, options=None: returns):
        refuse(ppo, tmp_path, part, begun=begun)


@pytest.mark.both
@pytest.mark.parametrize(("env", "part"), [
    ("RewardNaN", "must be a finite number, not nan"), ("RewardString", "must be a finite number, not '1.0'"), ("Exits", "SystemExit: 3"),  # noqa: E501
    ("Raises", "RuntimeError: the judge is out of order"),
    ("FourValues", "TypeError: step must return a tuple (message, reward"),
    ("WrongSignature", "TypeError"),
])  # fmt: skip
def test_environment_that_fails_is_named_with_the_seed(ppo, tmp_path, env, part):
    refuse(ppo, tmp_path, "cannot play the episode with seed ", part, begun=True, env_id=f"environments:{env}-v0")


@pytest.mark.parametrize(("env_id", "content", "part"), [
    ("GSM8K-v0", None, "No such file"), ("GSM8K-v0", "", "no rows in"), ("GSM8K-v0", "[5]", "use line 1 of"),
    ("GSM8K-v0", GSM8K_LINE + "\n" + GSM8K_LINE[:-9], "use line 2 of"), ("GSM8K-v0", "{'caf\xe9'}", "utf-8"),
    ("GSM8K-v0", PROMPT, "KeyError: 'answer'"), ("GSM8K-v0", '{"answer": "two"}', "no '#### number' in the answer"),
    *[("Prompts-v0", PROMPT + "\n" + line, f"use line 2 of ROWS (see docs/your_task.md): {x}") for line, x in [
        (PROMPT[:-1], "JSON"), ("5", "TypeError"),
        ('{"prompt": 5}', "TypeError: neither text nor a list of messages: 5"),
        ('{"instruction": "a"}', """ValueError: neither "prompt" nor "messages" is among its keys: ['instruction']"""),
        (MESSAGES("user", text=[{"type": "text"}]), "TypeError: {'role': 'user', 'content': [{'type': 'text'}]}: role"),
        *[(MESSAGES(*roles), "ValueError: there must be a message, and the last one must not be the assistant's")
          for roles in ([], ["user", "assistant"], ["assistant"])]]],
    ("Prompts-v0", "prompt\nab=", "use line 1 of"), ("Prompts-v0", f"[{PROMPT}, 5]", "use line 2 of"),
    ("Prompts-v0", "PAR1\xff\xfe", "must be text, with a JSON object on each line: UnicodeDecodeError"),
])  # fmt: skip
def test_file_that_is_wrong_is_named_with_the_line(ppo, tmp_path, env_id, content, part):
    path = tmp_path / "rows"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    flags = dict(env_id=env_id, env_kwargs=json.dumps({"path": str(path), "reward": "environments:length"}))
    refuse(ppo, tmp_path, path, part.replace("ROWS", str(path)), **flags)


@pytest.mark.parametrize(("reward", "second", "part"), [
    ("no_such_module:reward", "}", "cannot import the reward function no_such_module:reward: ModuleNotFoundError"),
    ("environments:rewrad", "}", "cannot import the reward function environments:rewrad: AttributeError"),
    (None, "}", "Prompts-v0: nothing gives rewards. Add --reward-model, or a reward function in --env-kwargs"),
    *[(name, "}", f"the reward function {name!r} must be 'my_module:my_function'") for name in ("bad", "environments")],
    *[(name, "}", f"cannot call {name} as reward(prompt, response, row=row): TypeError: {error}") for name, error in (
        ("environments:OPEN", "[] is not"), ("environments:third_is_line", ""), ("environments:two_parameters", ""))],
    ("environments:length", ', "demonstration": 5}', "cannot use the demonstration of seed "),
    *[("environments:length", second, "--sft-steps 1: 1 of 2 prompts have no demonstration, for example 'ab=': give")
      for second in ("}", ', "demonstration": null}')],
])  # fmt: skip
@pytest.mark.parametrize("seed", [1, 3])
def test_reward_function_or_demonstration_that_is_missing(ppo, tmp_path, reward, second, part, seed):
    """The first row has a demonstration. With seed 3 it is the first that trains, with seed 1 the second."""
    path = tmp_path / "rows"
    path.write_text(f'{{"prompt": "x=", "demonstration": "x"}}\n{PROMPT[:-1]}{second}')
    kwargs = json.dumps({"path": str(path), "reward": reward})
    refuse(ppo, tmp_path, part, sft_steps=1, seed=seed, env_id="Prompts-v0", env_kwargs=kwargs)


def test_functions_without_a_signature_and_with_adapters_are_no_bad_input(ppo, tmp_path):
    """As some functions in C, and those to which functools.wraps has given the signature of another function."""
    path = tmp_path / "rows"
    path.write_text(PROMPT)
    adapter = functools.wraps(environments.third_is_line)(lambda prompt, response, row: 1.0)
    for function in adapter, max, lambda *args, **kwargs: 1.0:
        with mock.patch.object(environments, "adapted", function, create=True):
            assert ppo.Prompts(str(path), "environments:adapted").reward is function


def test_rewards_that_are_not_finite_or_have_no_finite_square(ppo, tmp_path):
    large = dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 1e20}')
    refuse(ppo, tmp_path, "a reward, or its penalty for the KL, is not finite, or is too large", begun=True, **large)
    broken = changed(ppo.kl_estimate, lambda kl: kl / 0)
    with mock.patch.object(ppo, "kl_estimate", broken):
        refuse(ppo, tmp_path, "is not finite", begun=True, kl_coef=0.1, run_name="other")


@pytest.mark.parametrize(("value", "error"), [
    (torch.zeros(()), "TypeError"), ((1, 2), "ValueError: a resumed run would read [1, 2]"),
    ({1: 2}, "ValueError: a resumed run would read {'1': 2}"),
])  # fmt: skip
def test_a_state_that_is_not_json_is_refused_in_the_first_iteration(ppo, tmp_path, value, error):
    """Not when the first checkpoint is written, an hour later."""

    @dataclasses.dataclass
    class State(ppo.TrainState):
        baseline: object = dataclasses.field(default_factory=lambda: value)

    with mock.patch.object(ppo, "TrainState", State):
        refuse(ppo, tmp_path, f"cannot save TrainState.baseline, {value!r}, as JSON: {error}", begun=True)
    assert lines(tmp_path / "runs" / "run") == []


@pytest.mark.parametrize(("part", "changes"), [
    ("model_type 'gpt2': must be llama, mistral, qwen2, qwen3", {"model_type": "gpt2"}),
    *[("sliding_window 9: attention must have no window", {"sliding_window": 9} | kind) for kind in (
        {"model_type": "mistral"}, {"model_type": "qwen2", "use_sliding_window": True})],
    ("hidden_act 'gelu': must be silu", {"hidden_act": "gelu"}),
    ("is_causal false: attention must be causal", {"is_causal": False}),
    *[("rope_type must be one of ('default', 'linear', 'dynamic', 'yarn', 'llama3')", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0,
        "original_max_position_embeddings": 24}})],
    ("a vocabulary of 13 tokens, but the tokenizer needs 14", {"vocab_size": 13}),
    ("--max-prompt-tokens and --max-new-tokens: 24 tokens in total, but ", {"max_position_embeddings": 23}),
    *[("config.json: TypeError", {"rope_parameters": None, "rope_theta": x}) for x in ("5000", None)],
    ("Field 'rms_norm_eps' expected float", {"rms_norm_eps": None}),
    *[("Field 'eos_token_id'", {"eos_token_id": x}) for x in (["2"], [[2]], "<eos>")],
])  # fmt: skip
def test_model_whose_config_does_not_fit(ppo, tmp_path, part, changes):
    path = tmp_path / "model"
    tokenizer, model = ppo.embedded_model(ppo.fill_in_defaults(ppo.Args()), ppo.SortDigits())
    ppo.save_hf_checkpoint(model, tokenizer, path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    refuse(ppo, tmp_path, path, part, model=str(path), max_prompt_tokens=16, max_new_tokens=8)


def test_code_that_comes_with_a_model_is_refused_at_once(ppo, tmp_path):
    """In one line, and without a question on the terminal."""
    auto_map = {"AutoConfig": "configuration_new.NewConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": auto_map}))
    with mock.patch("builtins.input", return_value="n") as ask, pytest.raises(ppo.UserError) as error:
        ppo.load_config(str(tmp_path))
    assert not ask.called
    assert "contains custom code which must be executed" in str(error.value) and "\n" not in str(error.value)


HALF = "\ud83d"  # of a surrogate pair


@pytest.mark.parametrize("row", [
    {"prompt": HALF}, {"messages": [{"role": "user", "content": HALF}]}, {"messages": [{"role": HALF, "content": "a"}]},
])  # fmt: skip
def test_half_a_surrogate_pair_in_a_file_is_an_error_with_its_line(ppo, tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{PROMPT}\n{json.dumps(row)}\n")
    refuse(ppo, tmp_path, f"cannot use line 2 of {path}", "surrogates not allowed", env_id="Prompts-v0",
           env_kwargs=json.dumps({"path": str(path), "reward": "environments:length"}))  # fmt: skip


@pytest.mark.parametrize("prompt, demonstration, answer", [(HALF, "", ""), ("a", HALF, ""), ("a", "", HALF)])
def test_half_a_surrogate_pair_of_an_environment_is_an_error_with_its_seed(ppo, prompt, demonstration, answer):
    info = {"demonstration": demonstration}
    env = types.SimpleNamespace(reset=lambda seed: (prompt, info), step=lambda _: (answer, 0.0, False, False, {}))
    tokenizer, episode = ppo.HFTokenizer.from_texts(["ab"]), ppo.Episode(7)
    with pytest.raises(ppo.UserError, match=r"with seed 7: .*surrogates not allowed"):
        ppo.play_turn(ppo.Episode.begin, episode, env, tokenizer, ppo.Args(max_prompt_tokens=9))
        ppo.play_turn(ppo.Episode.end_turn, episode, env, 1, tokenizer, ppo.Args(max_new_tokens=9))


JUDGE = """
import itertools, multiprocessing, os, signal, subprocess, time

calls = itertools.count()

def reward(prompt, response, row):
    call = next(calls)
    if call >= 12:  # after the first evaluation, of 2 + 2, and a rollout of 8
        if call % 2:
            raise RuntimeError("the judge is out of order")
        time.sleep(3600)
    os.chdir("/")
    row["answers"].pop()  # its own row, not that of the next sample
    for end in signal.SIGTERM, signal.SIGINT:
        child = multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True)
        child.start()
        os.kill(child.pid, end)  # perhaps before the child has run
        child.join()
    subprocess.run(["true"], check=True, preexec_fn=os.setsid)
    with multiprocessing.Pool(1) as pool:
        return pool.apply(float, ["0.5"])
"""


@pytest.mark.both
@pytest.mark.slow
def test_what_reward_functions_do(ppo, tmp_path):
    """They change the directory and their row, fork processes, and raise while others hang: this ends the process."""
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "rows.jsonl").write_text('\n\n{"prompt": "ö\u2028=", "answers": [[1]]}\n \n', encoding="utf-8")
    kwargs = json.dumps({"path": "rows.jsonl", "reward": "judge:reward"})
    flags = dict(env_id="Prompts-v0", env_kwargs=kwargs, log_dir="runs")
    code, output = finish(start([sys.executable, ppo.__file__, *flags_of(**flags)], tmp_path), timeout=240)
    assert "reward 0.500" in output, output
    error = r"cannot play the episode with seed .*'content': .*: RuntimeError: the judge is"
    assert code == 2 and re.search(error, output), output
    run = tmp_path / "runs" / "run"
    assert len(lines(run)) == 1 and json.loads((run / "summary.json").read_text())["status"] == "failed"
