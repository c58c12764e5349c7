"""People's data, rewards and environments: what README.md and docs/your_task.md say, and their code, as it is.

Tried with gymnasium 1.4.0, gem-llm 0.1.0, textarena 0.7.4, textworld 1.7.0 and math-verify 0.9.0.
"""

import asyncio
import http.server
import importlib
import json
import math
import re
import sys
import threading
import types
from multiprocessing.pool import ThreadPool
from pathlib import Path

import environments
import numpy as np
import pytest
import torch
from test_model import CHATML, write_tokenizer
from test_rollout import ALPHABET, chat, make_envs, run, scripted_model, text
from test_train import lines, record

pytestmark = pytest.mark.shared

PAGE = (Path(__file__).parent.parent / "docs" / "your_task.md").read_text()
SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
ALTERNATE = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}")  # fmt: skip
QUERY = ("{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
         "{{ raise_exception('no user query') }}{% endif %}")  # fmt: skip
GEMMA = ("{{ bos_token or '' }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"  # noqa: E501
         "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")  # fmt: skip
LLAMA3 = ("{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
          "{% if add_generation_prompt %}[assistant]\n\n{% endif %}")  # fmt: skip
THINKS = (CHATML + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
          "<think>\n\n</think>\n\n{% endif %}")  # fmt: skip


def example(title, **modules):
    """A module of the page's code below `title`; `modules` are those that it imports from a user."""
    code = PAGE.split(f"**{title}**")[1].split("```python\n")[1].split("```")[0]
    name = re.sub(r"\W", "_", f"example {title}")
    module = sys.modules[name] = types.ModuleType(name)
    sys.modules.update({key: types.SimpleNamespace(**content) for key, content in modules.items()})
    exec(code, vars(module))
    return module


@pytest.fixture
def tokenizer(ppo):
    return ppo.HFTokenizer.from_texts([ALPHABET])


def prompts_of(ppo, tmp_path, reward, **row):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a="} | row))
    env = ppo.Prompts(str(tmp_path / "rows.jsonl"))
    env.reset(seed=0)
    env.reward = reward
    return env


def episode_of(ppo, tokenizer, env, answer="b", **flags):
    """One response, `answer` and <eos>, to what `env` asks."""
    episode = ppo.Episode(7)
    episode.begin(env, tokenizer, ppo.Args(max_prompt_tokens=99, max_new_tokens=99))
    ids = [*tokenizer.encode(answer), tokenizer.eos_id]
    episode.add(ids, [-1.0] * len(ids))
    episode.end_turn(env, episode.prompt_length, tokenizer, ppo.Args(max_new_tokens=99, **flags))
    return episode


TOOL = chat(("tool", "4"))
TURNS = chat(("system", "Be brief."), ("user", "a?"), ("assistant", "b"), ("user", "c?"))


def test_a_turn_that_another_stop_token_ended_is_closed_as_in_the_template(ppo, tmp_path):
    """As </answer> may, where the template ends turns with <|im_end|>."""
    files = {"generation_config": {"eos_token_id": [2, 3]}}
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, CHATML, **files))
    env = types.SimpleNamespace(reset=lambda seed: ("a", {}), step=lambda _: ("b", 0.0, False, False, {}))
    for stop_token, id_ in ("<|im_end|>", 2), ("<|eot|><|im_end|>", 3):
        episode = ppo.Episode(7)
        episode.begin(env, tokenizer, ppo.Args(max_prompt_tokens=99))
        episode.add([*tokenizer.encode("e"), id_], [0.0] * 2)
        episode.end_turn(env, episode.prompt_length, tokenizer, ppo.Args(max_new_tokens=99))
        text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\ne"
        text += stop_token + "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.hf.decode(episode.ids) == text


@pytest.mark.parametrize("template", [CHATML, GEMMA, LLAMA3, THINKS, QUERY + CHATML, SYSTEM + CHATML,
                                      ALTERNATE + LLAMA3, None])  # fmt: skip
@pytest.mark.parametrize("prompt", [TURNS, TURNS[1:], TURNS[:2], TURNS[1:2], "a?"])
def test_messages_have_the_ids_of_the_template_and_so_have_those_between_turns(ppo, tmp_path, template, prompt):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, template))
    messages = prompt if isinstance(prompt, list) else chat(("user", prompt))
    env = types.SimpleNamespace(reset=lambda seed: (prompt, {}), step=None)
    if template and messages[0]["role"] == "system" and template.startswith((SYSTEM, ALTERNATE)):
        with pytest.raises(ppo.UserError, match=r"the chat template of .*: (no system role|roles must alternate)"):
            ppo.Episode(7).begin(env, tokenizer, ppo.Args(max_prompt_tokens=999))
        return
    for feedback in "d", TOOL, [*TOOL, *chat(("user", "d"))]:
        if template == ALTERNATE + LLAMA3 and feedback != "d":
            continue
        env.step = lambda _, feedback=feedback: (feedback, 0.0, False, False, {})
        episode = ppo.Episode(7)
        episode.begin(env, tokenizer, ppo.Args(max_prompt_tokens=999))
        ids = [*tokenizer.encode("e"), tokenizer.eos_id]
        episode.add(ids, [0.0] * len(ids))
        episode.end_turn(env, episode.prompt_length, tokenizer, ppo.Args(max_new_tokens=999))
        between = chat(("user", "d")) if feedback == "d" else feedback
        assert episode.conversation == [*messages, *chat(("assistant", "e")), *between]
        whole = tokenizer.render(episode.conversation)
        if not template:
            whole = "".join(m["content"] for m in messages) + "e<|im_end|>" + "".join(m["content"] for m in between)
        assert tokenizer.hf.decode(episode.ids) == whole
        assert [i for i, sampled in zip(episode.ids, episode.mask) if sampled] == ids
        assert episode.prompt_messages == len(messages)


def test_messages_that_the_environment_changes_later_stay_as_they_were(ppo, tokenizer):
    """The conversation, which is logged and scored, is the one whose ids are trained on."""
    [message] = chat(("user", "a"))
    contents = iter("cd")

    def step(response):
        message["content"] = next(contents)
        return [message], 0.0, False, False, {}

    env, args = types.SimpleNamespace(reset=lambda seed: ([message], {}), step=step), ppo.Args(max_new_tokens=99)
    episode = episode_of(ppo, tokenizer, env)
    episode.add([*tokenizer.encode("b"), tokenizer.eos_id], [-1.0] * 2)
    episode.end_turn(env, len(episode.ids) - 2, tokenizer, args)
    assert [turn["content"] for turn in episode.conversation] == ["a", "b", "c", "b", "d"]
    assert tokenizer.hf.decode(episode.ids) == "ab<eos>cb<eos>d"
    assert ppo.logged_samples([episode], ppo.Experience.from_episodes([episode]))[0]["prompt"] == "a"


def test_arguments_of_the_template_and_what_is_wrong_with_them(ppo, tmp_path):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, THINKS))
    ends = lambda ids: tokenizer.hf.decode(ids).endswith("<think>\n\n</think>\n\n")
    assert not ends(tokenizer.encode_prompt("a")) and not ends(tokenizer.encode_feedback("a", tokenizer.eos_id))
    tokenizer.template_kwargs = '{"enable_thinking": false}'
    assert ends(tokenizer.encode_prompt("a")) and ends(tokenizer.encode_feedback("a", tokenizer.eos_id))
    for wrong in "{enable}", "[1]", '{"tokenize": true}':
        tokenizer.template_kwargs = wrong
        with pytest.raises(ppo.UserError, match=re.escape(f"cannot render with {wrong} the chat template")):
            tokenizer.encode_prompt("a")


@pytest.mark.parametrize("feedback", [None, 5, b"c", {"a": 1}, {"a": 1, "b": 2}, [], ["c"], [{"role": "user"}],
                                      [{"role": "tool", "content": {"x": 1}}], np.zeros(2)])  # fmt: skip
def test_what_is_no_text_between_turns_is_an_error_that_names_the_seed(ppo, tokenizer, feedback):
    actor, envs = scripted_model(ppo, tokenizer, {"=": "b"}), make_envs("Endless", 1, feedback=feedback)
    with pytest.raises(ppo.UserError, match="cannot play the episode with seed 3: "):
        run(ppo, actor, tokenizer, envs, ids=[(3, 0)])


NUMBERS = [np.float32(0.5), np.int64(2), np.array(0.5), torch.tensor(0.5), torch.tensor(2), True]


@pytest.mark.parametrize("x", NUMBERS, ids=str)
def test_numbers_of_numpy_and_torch_become_floats(ppo, tokenizer, x):
    info = {"rewards": [(1, x)], "metrics": {"a": x}, "success": np.bool_(False)}
    env = types.SimpleNamespace(reset=lambda seed: ("a", {}), step=lambda _: ("", x, np.bool_(True), False, info))
    episode = episode_of(ppo, tokenizer, env)
    assert json.loads(json.dumps(episode.rewards)) == [0, float(x), float(x)] and episode.success is False
    assert json.loads(json.dumps(episode.metrics)) == {"a": float(x)}


@pytest.mark.parametrize(("part", "reward", "terminated", "info"), [
    *[(f"a number in info['rewards'] must be a finite number, not {x!r}", 1.0, True, {"rewards": [(1, x)]})
      for x in (np.float32(math.nan), "1")],
    *[(f"the metric 'a' must be a finite number, not {x!r}", 1.0, True, {"metrics": {"a": x}}) for x in (None, "text")],
    ("the reward of a step must be a finite number, not {'score'", {"score": 1.0}, True, {}), ("the reward of a step must be a finite number, not [1.0]", [1.0], True, {}),  # noqa: E501
])  # fmt: skip
def test_what_is_no_number_is_refused(ppo, tokenizer, part, reward, terminated, info):
    env = types.SimpleNamespace(reset=lambda seed: ("a", {}), step=lambda _: ("", reward, terminated, False, info))
    with pytest.raises(ValueError, match=re.escape(part)):
        episode_of(ppo, tokenizer, env)


@pytest.mark.parametrize(("result", "expected"), [
    (0.5, (0.5, True, {})), ((0.5, False), (0.5, False, {})), ((0.0, True), (0.0, True, {})),
    ((0.0, {"format": 1.0, "right": 0}), (0.0, False, {"format": 1.0, "right": 0.0})), ((1.0, {}), (1.0, True, {})),
    ((0.5, False, {"a": 1}), (0.5, False, {"a": 1.0})), ((0.5, {"a": 1}, False), (0.5, False, {"a": 1.0})),
    *[(wrong, None) for wrong in ((0.5, {"a": "b"}), (0.5, True, 0.25))],
])  # fmt: skip
@pytest.mark.parametrize("is_async", [False, True])
def test_results_of_a_reward_function(ppo, tokenizer, tmp_path, result, expected, is_async):
    async def later(prompt, response, row):
        await asyncio.sleep(0)
        return result

    env = prompts_of(ppo, tmp_path, later if is_async else lambda prompt, response, row: result)
    if expected is None:
        with pytest.raises(ValueError):
            episode_of(ppo, tokenizer, env)
        return
    episode = episode_of(ppo, tokenizer, env)
    assert (episode.rewards[-1], episode.success, episode.metrics) == expected


def test_a_reward_function_may_change_its_row(ppo, tmp_path):
    """The next sample of the prompt gets the row of the file again."""
    env = prompts_of(ppo, tmp_path, lambda prompt, response, row: row["answers"].pop() == "x", answers=["x"])
    other = prompts_of(ppo, tmp_path, env.reward, answers=["x"])
    for _ in range(2):
        for each in env, other:
            each.reset(seed=0)
            assert each.step("b")[1] is True


@pytest.mark.parametrize("content", ['{"prompt": "é"}\r\n\r\n{"prompt": "b"}', '[{"prompt": "é"}, {"prompt": "b"}]'])
def test_files_of_windows_have_their_rows(ppo, tmp_path, content):
    """They may begin with a byte-order mark."""
    (tmp_path / "rows.jsonl").write_bytes(content.encode("utf-8-sig"))
    assert sorted(row["prompt"] for row in ppo.Prompts(str(tmp_path / "rows.jsonl")).rows) == ["b", "é"]


def test_functions_with_another_signature_are_refused(ppo, tmp_path):
    """Not called with a row as ground truth."""
    verl = lambda data_source, solution_str, ground_truth, extra_info=None: 1.0
    for function in verl, lambda prompts, completions, answer, **columns: [1.0], lambda completions, **columns: [1.0]:
        with pytest.raises(TypeError, match="argument"):
            prompts_of(ppo, tmp_path, function).step("b")


class Unscored(environments.TextEnv):
    """Every third sample has no reward, and no further prompt. Its first one is absurd, that of others half a point."""

    def turn(self, response):
        metrics = {"metrics": {"turns": len(self.seen), "third": self.seed % 3 == 1}}
        if self.seed % 3 == 0:
            return (None, None, False, False, metrics) if len(self.seen) == 2 else ("c", 1e30, False, False, metrics)
        return "c", 0.5, len(self.seen) == 2, False, metrics


environments.gym.register("Unscored-v0", entry_point=Unscored)


@pytest.mark.both
def test_samples_without_a_reward_do_not_train_and_are_counted_and_metrics_are_logged(ppo, tmp_path):
    seen = record(ppo, tmp_path, env_id="Unscored-v0", max_new_tokens=64, eval_episodes=6, eval_every=1, kl_coef=0.1,
                  recompute_old_logprobs=False)  # fmt: skip
    for row, episodes, call in zip(seen.rows, seen.episodes, seen.calls["make_experience"], strict=True):
        thirds = torch.tensor([e.stop == "unscored" for e in episodes])
        assert thirds.tolist() == [e.env_seed % 3 == 0 for e in episodes] and 0 < thirds.sum() < 8
        e = call["result"] if "result" in call else ppo.Experience.from_episodes(episodes)
        assert not e.mask[thirds].any() and e.mask[~thirds].any(1).all() and (e.sampler_logprobs[thirds] == 0).all()
        assert not any(x.success for x in episodes if x.stop == "unscored")
        assert row["objective/unscored"] == thirds.float().mean()
        logged = [line for line in lines(seen.folder, "completions") if line["iteration"] == row["iteration"]]
        rewards = [None if e.stop == "unscored" else sum(e.rewards) for e in episodes]
        assert [line.get("reward") for line in logged] == rewards[:4]
        turns = [e.metrics["turns"] for e in episodes if e.stop != "unscored"]
        assert row["env/turns"] == pytest.approx(sum(turns) / len(turns))
        assert row["objective/response_tokens"] == pytest.approx(sum(sum(e.mask) for e in episodes) / len(turns))
    assert seen.rows[1]["eval/env/third"] == seen.summary["eval_before"]["env/third"] == pytest.approx(2 / 4)
    assert seen.summary["eval_after"]["unscored"] == pytest.approx(2 / 6)


def test_without_evaluations(ppo, tmp_path):
    seen = record(ppo, tmp_path, eval_episodes=0, eval_every=1)
    assert not seen.evaluations and seen.summary["eval_before"] == seen.summary["eval_after"] == {}


@pytest.mark.both
def test_max_episode_steps_of_gymnasium_limits_the_turns(ppo, tokenizer):
    args = ppo.Args(env_id="environments:Endless-v0", env_kwargs='{"max_episode_steps": 2}', rollout_batch_size=4)
    actor = scripted_model(ppo, tokenizer, {"=": "b", "c": "b"})
    with ppo.make_envs(args) as envs:
        for episode in run(ppo, actor, tokenizer, envs, rollout_slots=4):
            assert (text(episode), episode.stop) == ("bcb", "truncated")


def test_whole_prompts_are_in_completions(ppo, tmp_path, tokenizer):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"messages": TURNS, "prompt": TURNS[:2]}, {"messages": TURNS[:2]}], indent=2))
    flags = dict(env_id="Prompts-v0", env_kwargs=json.dumps({"path": str(rows), "reward": "environments:length"}))
    record(ppo, tmp_path, **flags, max_prompt_tokens=40)
    samples = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert {sample["prompt"] for sample in samples} == {"Be brief.\na?"}


def test_a_file_of_prompts_that_has_changed_is_read_anew_by_the_next_run(ppo, tmp_path):
    rows = tmp_path / "rows.jsonl"
    environments.gym.register("Changed-v0", entry_point=ppo.Prompts)  # Prompts-v0 may be that of the other script.
    flags = dict(env_id="Changed-v0", env_kwargs=json.dumps({"path": str(rows), "reward": "environments:length"}))
    for name, prompt in ("first", "a="), ("second", "b="):
        rows.write_text(json.dumps({"prompt": prompt}))
        record(ppo, tmp_path, **flags, run_name=name, num_iterations=1)
        samples = map(json.loads, (tmp_path / name / "completions.jsonl").read_text().splitlines())
        assert {sample["prompt"] for sample in samples} == {prompt}


def test_the_game_of_the_page():
    code = PAGE.split("## Several turns")[1].split("```python\n")[1].split("```")[0]
    module = {}
    exec(code, module)
    game = module["GuessNumber"]()
    for seed in range(8):
        _, info = game.reset(seed=seed)
        assert info["demonstration"] in "01234567" and game.number in range(8)
        answers = [game.step(str(guess)) for guess in range(game.number + 1)]
        assert [answer[:3] for answer in answers] == [(">", -0.2, False)] * game.number + [("", 1.0, True)]
        assert game.step("?")[0] == (">" if game.number else "?")


def test_gsm8k_with_a_system_prompt(ppo, tmp_path):
    """The class of the page: the prompt becomes the second message, and rewards stay as they are."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    env = example("GSM8K with a system prompt.").BriefGSM8K(str(rows))
    messages, _ = env.reset(seed=0)
    plain, _ = ppo.GSM8K(str(rows)).reset(seed=0)
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": plain}]
    assert [env.step(response)[1] for response in ("#### 2", "#### 3")] == [1.0, 0.0]


def test_the_reward_function_of_the_front_page():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    module = {}
    exec("def reward" + readme.split("```python\ndef reward")[1].split("```")[0], module)
    assert module["reward"]("Capital of Peru?", "It is Lima", {"answer": "Lima"}) == (0.97, True)


def test_verl_and_trl(ppo, tokenizer, tmp_path):
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": 0.5, "acc": True, "pred": "b"}

    row = dict(prompt=TURNS[1:2], data_source="math", reward_model={"ground_truth": "4", "style": "rule"}, extra_info={"i": 1})  # noqa: E501
    verl = example("verl's", my_scores=dict(compute_score=compute_score))
    episode = episode_of(ppo, tokenizer, prompts_of(ppo, tmp_path, verl.reward, **row))
    assert seen == [("math", "b", "4", {"i": 1})]
    assert (episode.rewards[-1], episode.metrics) == (0.5, {"score": 0.5, "acc": 1.0})

    def trl_reward(prompts, completions, answer, **columns):
        seen.append((len(prompts), columns))
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [None if x == "?" else float(len(x)) for x in texts]

    batched = example("Functions that take lists", my_scores=dict(trl_reward=trl_reward))
    for prompt in "a", TURNS[1:2]:
        calls = [(prompt, answer, {"prompt": prompt, "answer": "4", "level": 3}) for answer in ("b", "bb", "?", "bbbb")]
        seen.clear()
        with ThreadPool(4) as threads:
            assert threads.starmap(batched.reward, calls) == [1.0, 2.0, None, 4.0]
        assert sum(n for n, _ in seen) == 4 and len(seen) < 4 and seen[0][1]["level"][0] == 3
    with pytest.raises(TypeError, match="answer"):
        batched.reward("a", "b", {"prompt": "a"})


def test_a_judge_that_is_slow_and_fails():
    answers = iter([(500, b"{}"), (200, b"no JSON"), (200, b'{"score": 0.25}'), *4 * [(503, b"")]])

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.headers["Content-Type"] == "application/json"
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = next(answers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        log_message = lambda *_: None

    server = http.server.ThreadingHTTPServer(("localhost", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    judge = example("A judge over HTTP")
    judge.URL, judge.WAITS = f"http://localhost:{server.server_port}", (0.01, 0.01, 0.01)
    assert judge.reward("a", "b", {}) == 0.25 and judge.reward("a", "b", {}) is None
    server.shutdown()


def test_math_verify_on_threads():
    """Without the package, something else that only works in the main thread of a process."""
    if not importlib.util.find_spec("math_verify"):
        import signal

        def parse(text):
            signal.setitimer(signal.ITIMER_REAL, 0)  # what signal.alarm does, only later
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # raises on other threads
            return text.strip("so $")

        modules = dict(math_verify=dict(parse=parse, verify=lambda a, b: a == b))
    else:
        modules = {}
    module = example("math-verify", **modules)
    calls = [("", f"so ${x}$", {"answer": "$72$"}) for x in ("72", "9^{9^{9}}", "5", "72")]
    with ThreadPool(4) as threads:
        assert threads.starmap(module.reward, calls) == [1.0, 0.0, 0.0, 1.0]
    module.pool.terminate()


@pytest.mark.parametrize(("title", "package", "kwargs", "answers"), [
    ("gymnasium's toy text games", "gymnasium", {}, ["up there", "left", *"down down right right down right".split()]),
    ("GEM", "gem", {"game": "game:GuessTheNumber-v0-easy"}, [f"\\boxed{{{n}}}" for n in range(1, 11)]),
    ("TextArena", "textarena", {"game": "GuessTheNumber-v0"}, [f"[{n}]" for n in range(1, 21)]),
    ("TextWorld", "textworld", {"games": "games/*.z8"}, ["look", "inventory", "go south"]),
])  # fmt: skip
def test_environments_of_others(ppo, title, package, kwargs, answers):
    """On threads, the same seed gives the same prompt; every turn is text; the games end."""
    pytest.importorskip(package)
    if "games" in kwargs and not list(Path().glob(kwargs["games"])):
        pytest.skip("tw-make custom --world-size 2 --nb-objects 3 --quest-length 2 --seed 1 --output games/1.z8")
    module = example(title)
    [env_class] = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, environments.gym.Env)]
    envs = [env_class(**kwargs) for _ in range(16)]
    prompts = lambda: [messages for messages, _ in threads.starmap(ppo.checked_reset, [(env, i % 8) for i, env in enumerate(envs)])]  # noqa: E501
    with ThreadPool(16) as threads:
        first = prompts()
        assert first == prompts() and first[:8] == first[8:]
    for answer in answers:
        messages, reward, end, info = ppo.checked_step(envs[0], answer)
        ppo.to_float(reward, "reward")
        if end:
            break
        assert messages[0]["content"].strip()
    assert end == "terminated" or title == "TextWorld"
    assert title != "gymnasium's toy text games" or info["success"]
