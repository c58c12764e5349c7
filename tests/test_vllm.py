"""forks/vllm.patch with a stand-in for vLLM, which tests/fake has, and with the real one.

The tests of the real one are slow, and need VLLM_PYTHON: the interpreter of an environment of benchmarks/vllm.sh.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shlex
import sys
import threading
import types

import pytest
import torch
import tyro
from conftest import ROOT
from environments import TextEnv
from test_distributed import finish, same_run, start, torchrun
from test_distributed import flags_of as flags_of_command
from test_forks import PAIRS, PATCHES, patched_script, run
from test_train import lines, without_clock

import ppo_llm

sys.path.insert(0, str(ROOT / "tests" / "fake"))
import vllm

TEXT = "0123456789= abcdefghijklmnopqrstuvwxyz?+-.,:<>"
STOPS = "fghijk"


def random_llama(folder, tied):
    """A checkpoint whose heads are large enough for vLLM on a CPU.

    It has seven ids that the tokenizer does not have, as padded vocabularies do, and defaults of sampling, which must
    not be used.
    """
    torch.manual_seed(0)
    tokenizer = ppo_llm.HFTokenizer.from_texts([TEXT])
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, vocab_size=tokenizer.vocab_size + 7, max_position_embeddings=512)  # fmt: skip
    special = dict(bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    config = ppo_llm.LlamaConfig(**sizes, **special, tie_word_embeddings=tied)
    model = ppo_llm.Transformer(ppo_llm.check_config(config))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.2)
    ppo_llm.save_hf_checkpoint(model, tokenizer, folder)
    defaults = dict(repetition_penalty=1.5, top_k=3, top_p=0.5, temperature=0.1, max_new_tokens=2)
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {tied: random_llama(folder / str(tied), tied) for tied in (True, False)}


@contextlib.contextmanager
def patched(folder, patches="vllm", old="", new=""):
    """The patched script as the module ppo_llm, with `new` in place of `old`."""
    script = patched_script(patches, folder)
    text = script.read_text()
    assert not old or text.count(old) == 1, old
    module = types.ModuleType("ppo_llm")
    module.__file__ = str(script)
    with pytest.MonkeyPatch.context() as context:
        context.setitem(sys.modules, "ppo_llm", module)  # Episodes are pickled.
        exec(compile(text.replace(old, new) if old else text, script, "exec"), module.__dict__)
        yield module


def flags_of(model, **flags):
    small = dict(max_prompt_tokens=32, max_new_tokens=14, rollout_batch_size=8, train_batch_size=8, device="cpu")
    return small | dict(model=model, temperature=0.6) | flags


def start_engine(ppo, **flags):
    args = ppo.fill_in_defaults(ppo.Args(**flags))
    engine = ppo.Engine(args)
    tokenizer, actor = ppo.build_actor(args, None)
    engine.load(actor)
    return args, engine, tokenizer, actor


def gap(ppo, episodes, actor, args):
    """Mean distance of the sampler's log-probs from the actor's."""
    e = ppo.Experience.from_episodes(episodes)
    logprobs = ppo.logprobs_of_all(actor, e, [torch.arange(len(episodes))], args)
    return float((e.sampler_logprobs - logprobs)[e.mask].abs().mean())


@torch.no_grad()
def change(actor):
    """A large update of the actor. Returns its relative size."""
    before = torch.cat([p.detach().flatten() for p in actor.parameters()])
    for p in actor.parameters():
        p.add_(torch.randn_like(p) * 0.05)
    after = torch.cat([p.detach().flatten() for p in actor.parameters()])
    return float((after - before).norm() / after.norm())


def check_engine(ppo, model, **flags):
    """Rollouts before and after an update of the actor, in two turns: log-probs, noise, stop ids, limit, greedy ones.

    The stop ids of the script are letters here, not the eos of the model.
    """
    args, engine, tokenizer, actor = start_engine(ppo, **flags_of(model, **flags))
    tokenizer.stop_ids = tokenizer.encode(STOPS)
    envs = [TextEnv() for _ in range(6)]
    for env in envs:
        env.turn = lambda response, env=env: ("c", 0.5, len(env.seen) == 2, False, {})
    play = lambda args: ppo.rollout(engine, tokenizer, envs, range(12), 0, args)
    sizes, seen = [], set()
    for _ in range(2):
        episodes, asked = play(args), engine.llm.asked
        assert [e.ids for e in episodes] == [e.ids for e in play(args)]  # the noise repeats
        assert gap(ppo, episodes, actor, args) < (0.05 if args.dtype == "bfloat16" else 1e-5)
        assert len({params.seed for _, _, params in asked}) == len(asked) / 2 == sum(
            len(e.response_starts) for e in episodes)  # fmt: skip
        assert {e.stop for e in episodes} == {"terminated", "length"}
        for e in episodes:
            for first in e.response_starts:
                *inside, last = itertools.takewhile(lambda k: e.mask[k], range(first, len(e.ids)))
                assert not {e.ids[k] for k in inside} & {*tokenizer.stop_ids}
                assert e.ids[last] in tokenizer.stop_ids or last + 1 == e.prompt_length + args.max_new_tokens
            seen |= {*e.ids}
        greedy = ppo.Experience.from_episodes(play(dataclasses.replace(args, temperature=0.0)))
        with torch.no_grad():
            best = actor(greedy.tokens)[:, :-1].argmax(-1)
        assert torch.equal(*(x[greedy.mask[:, 1:]] for x in (best, greedy.tokens[:, 1:]))) or "dtype" in flags
        asked.clear()
        size = change(actor)
        sizes.append((ppo.update_sampler(actor, engine), size))
    assert tokenizer.eos_id in seen  # It has ended no response.
    assert "lora_rank" in flags or all(found == pytest.approx(size, rel=0.02) for found, size in sizes)


@pytest.mark.parametrize(("patches", "tied", "flags"), [
    ("vllm", True, {}), ("vllm", False, {}), ("vllm", False, dict(dtype="bfloat16")),
    ("lora,vllm", True, dict(lora_rank=4)),
], ids=str)  # fmt: skip
def test_engine(patches, tied, flags, models, tmp_path):
    with patched(tmp_path, patches) as ppo:
        check_engine(ppo, models[tied], **flags)


class Turns(TextEnv):
    """Seed i ends after i turns. All others wait in their first turn until seed 4 has ended."""

    def __init__(self, patience):
        self.patience, self.waited = patience, True

    def turn(self, response):
        if self.seed != 4 and len(self.seen) == 1:
            self.waited = ENDED.wait(self.patience)
        if self.seed == 4 and len(self.seen) == 4:
            ENDED.set()
        return "c", 0.5, len(self.seen) == self.seed, False, {}


ENDED = threading.Event()


def check_turns(ppo, model, patience=60):
    """A turn waits for the environment of no other episode."""
    args, engine, tokenizer, _ = start_engine(ppo, **flags_of(model, max_new_tokens=100))
    tokenizer.stop_ids = tokenizer.encode(STOPS)
    ENDED.clear()
    envs = [Turns(patience) for _ in range(4)]
    episodes = ppo.rollout(engine, tokenizer, envs, range(1, 5), 0, args)
    assert [len(e.response_starts) for e in episodes] == [1, 2, 3, 4]
    assert all(env.waited for env in envs)


def test_a_turn_waits_for_no_other_episode(models, tmp_path):
    with patched(tmp_path) as ppo:
        check_turns(ppo, models[True])


def test_runs_resume_and_log(models, tmp_path):
    """Several turns, and evaluations. The distance of the log-probs is that of rounding in all iterations."""
    flags = flags_of(models[True], env_id="benchmarks.tasks:Guess-v0", actor_lr=1e-2, eval_every=1)
    _, rows, folder = run("vllm", tmp_path, **flags)
    assert all(0 < row["debug/sampler_trainer_logprob_diff"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and 0.01 < row["ratio/relative_update"] < 1 for row in rows)
    assert {params.temperature for _, _, params in vllm.LLM.engines[-1].asked} == {0.0, 0.6, 1.0}
    exported = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "checkpoints" / "iter_000002").rename(tmp_path / "gone")
    _, again, _ = run("vllm", tmp_path, resume="auto", **flags)
    assert without_clock(again) == without_clock(rows)
    assert (folder / "model" / "model.safetensors").read_bytes() == exported


REFUSED = {  # flags that are refused, and what the error says
    "--model: must be given": dict(model=None),
    "--sampler-ranks 2: must divide 1 ranks": dict(sampler_ranks=2),
    "--sampler-ranks 0: must divide 1 ranks": dict(sampler_ranks=0),
    "--vllm-cache-gb 1e-06 for at least a sample of 46 tokens: ValueError": dict(vllm_cache_gb=1e-6),
    r"import vLLM 0\.32\.\*: docs/vllm\.md": dict(vllm=None),
    r"vLLM 0\.33\.1: must be 0\.32\.\*": dict(version="0.33.1"),
    "vLLM runs this family with the classes of transformers": dict(module="vllm.models.transformers.causal"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_an_error_before_a_model_is_loaded(message, models, tmp_path, monkeypatch):
    flags = flags_of(models[True], env_id="environments:Plain-v0") | REFUSED[message]
    if "vllm" in flags:
        monkeypatch.setitem(sys.modules, "vllm", flags.pop("vllm"))
    monkeypatch.setattr(vllm, "__version__", flags.pop("version", "0.32.0"))
    monkeypatch.setattr(vllm.Model, "__module__", flags.pop("module", "vllm.models.llama"))
    with patched(tmp_path) as ppo:
        monkeypatch.setattr(ppo, "build_actor", None)
        with pytest.raises(ppo.UserError, match=message):
            ppo.train(ppo.Args(**flags))


def test_the_commands_of_the_page(tmp_path):
    page = (ROOT / "docs" / "vllm.md").read_text().replace("\\\n", " ")
    with patched(tmp_path) as ppo:
        commands = re.findall(r"ppo_llm\.py (-.*)", page)
        for command in commands:
            tyro.cli(ppo.Args, args=[word for word in shlex.split(command) if word != "..."])  # exits if it is wrong
        assert len(commands) >= 4
    assert {*re.findall(r"forks/(\w+)\.patch", page)} <= {*PATCHES}


MISTAKES = {  # what is planted in the patched script: (text, what replaces it)
    "no hand-over": ("    sampler.load(actor)\n    after", "    after"),
    "the prefix cache is not reset": ("if not engine.llm.reset_prefix_cache():", "if False:"),
    "raw log-probs": ('logprobs_mode="processed_logprobs",', ""),
    "a tied head is stale": ("                method.process_weights_after_loading(layer)", "                pass"),
    "seeds without the turn": ('f"{episode.noise_key} {len(episode.ids)}"', 'f"{episode.noise_key}"'),
    "seeds without the sample": ('f"{episode.noise_key} {len(episode.ids)}"', 'f"{len(episode.ids)}"'),
    "the model's stop ids as well": ("ignore_eos=True,", ""),
    "the model's stop ids alone": ("stop_token_ids=stop_ids,", ""),
    "a limit for each turn": ("episode.prompt_length + args.max_new_tokens - len(episode.ids)", "args.max_new_tokens"),
    "no greedy evaluation": ("temperature=args.temperature,", "temperature=args.temperature or 1.0,"),
    "an update that is not measured": ("self.some_weights = torch.cat(some)", "self.some_weights = torch.ones(9)"),
    "turns wait for all environments": ("wait_for(any, calls.values())", "wait_for(all, calls.values())"),
    "adapters are left out": ("(full_tensor(p) + layer.scale * adapter)", "full_tensor(p)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, models, tmp_path):
    lora = name == "adapters are left out"
    with patched(tmp_path, "lora,vllm" if lora else "vllm", *MISTAKES[name]) as ppo:
        with pytest.raises(AssertionError):
            check_engine(ppo, models[True], **({"lora_rank": 4} if lora else {}))
            check_turns(ppo, models[True], patience=1)


@pytest.mark.slow
@pytest.mark.parametrize("other", sorted({*itertools.chain(*(pair for pair in PAIRS if "vllm" in pair))} - {"vllm"}))
def test_pairs_train(other, models, tmp_path):
    flags = flags_of(models[True], rollout_batch_size=8, train_batch_size=16, temperature=1.0)
    _, rows, _ = run(f"{other},vllm", tmp_path, **flags)
    assert len(rows) == 2 and rows[0]["actor/grad_norm"] > 0
    assert all(row["debug/sampler_trainer_logprob_diff"] < 1e-5 for row in rows)


REAL = os.environ.get("VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(not REAL, reason="needs VLLM_PYTHON: see benchmarks/vllm.sh")
ENGINES = ["stand-in", pytest.param("vLLM", marks=needs_vllm)]


def finished(engine, command, ranks=1):
    """Run a script, on ranks of torchrun if there are several, with the stand-in or with vLLM."""
    python = REAL if engine == "vLLM" else sys.executable
    command = torchrun(ranks, *command) if ranks > 1 else [None, *map(str, command)]
    with pytest.MonkeyPatch.context() as context:
        if engine == "stand-in":
            context.setenv("PYTHONPATH", str(ROOT / "tests" / "fake"))
        code, output = finish(start([python, *command[1:]], ROOT), timeout=900)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("sampler_ranks", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_with_an_engine_each_or_together_have_the_numbers_of_one(engine, sampler_ranks, models, tmp_path):
    flags = flags_of(models[True], num_iterations=2, env_id="benchmarks.tasks:Guess-v0", actor_lr=1e-3, eval_episodes=3)
    flags |= dict(temperature=1.0, log_dir=tmp_path, vllm_cache_gb=0.2)
    script = patched_script("vllm", tmp_path)
    finished(engine, [script, *flags_of_command(**flags | dict(run_name="one"))])
    two = flags | dict(run_name="two", sampler_ranks=sampler_ranks)
    finished(engine, [script, *flags_of_command(**two)], ranks=2)
    same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("more", [(), ("--dtype", "bfloat16"), ("--patches", "lora")])
@pytest.mark.parametrize("tied", [True, False])
def test_vllm(tied, more, models):
    """Log-probs, noise, ends, turns, weights, and its prefix cache."""
    finished("vLLM", [ROOT / "tests" / "check_vllm.py", models[tied], *more])


@pytest.mark.slow
@needs_vllm
def test_vllm_in_a_run_that_resumes(models, tmp_path):
    flags = flags_of(models[True], env_id="environments:Plain-v0", log_dir=tmp_path, run_name="run", num_iterations=3)
    flags |= dict(save_every=1, resume="auto", vllm_cache_gb=0.2)
    command = [patched_script("vllm", tmp_path), *flags_of_command(**flags)]
    finished("vLLM", command)
    rows, exported = lines(tmp_path / "run"), (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert all(row["ratio/first_dev"] == 0 and row["debug/sampler_trainer_logprob_diff"] < 1e-5 for row in rows)
    (tmp_path / "run" / "checkpoints" / "iter_000003").rename(tmp_path / "gone")
    finished("vLLM", command)
    assert without_clock(lines(tmp_path / "run")) == without_clock(rows)
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == exported
