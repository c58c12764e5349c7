"""tokens.jsonl has what was computed for every token; benchmarks/look.py shows it on a page that no text can break."""

import base64
import fcntl
import hashlib
import html.parser
import importlib.util
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import distributed_worker
import pytest
import tokenizers
import torch
import transformers
from conftest import ROOT
from test_checkpoints import assert_same, train
from test_distributed import assert_same_tokens
from test_train import SMALL, lines, record

import ppo_llm

sys.path.append(str(ROOT / "benchmarks"))
import blame
import look

pytestmark = pytest.mark.shared

KEYS = {*"iteration sample stop response_starts ids text mask trained tensors".split()}
COLUMNS = "sampler_logprobs rewards old_logprobs ref_logprobs values returns advantages new_logprobs".split()


# --- Pieces of a text


def byte_level(ppo):
    """A tokenizer whose tokens are all bytes, and a few words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator(["the sum is 42. "] * 9, trainer)
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return ppo.HFTokenizer("bytes", hf)


def byte_fallback(ppo):
    """As Llama 2 has it: a few letters, all bytes, and a decoder that drops the space at the start of a text."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abc42."]
    bpe = tokenizers.models.BPE({x: i for i, x in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer, steps = tokenizers.Tokenizer(bpe), tokenizers.decoders
    tokenizer.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])  # fmt: skip
    tokenizer.decoder = steps.Sequence([
        steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])  # fmt: skip
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    return ppo.HFTokenizer("fallback", hf)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_pieces_of_any_ids_join_to_the_whole_text(ppo, kind):
    """Also of ids that are no UTF-8, or that end within a character. DecodeStream raises for some of them."""
    tokenizer, rng = kind(ppo), random.Random(0)
    whole = lambda ids: tokenizer.backend.decode(ids, skip_special_tokens=False)
    words = tokenizer.encode("the sum is 42. ")
    for n in range(100):  # Long texts are divided.
        ids = rng.choices(range(tokenizer.vocab_size), k=2 * n) + 9 * words
        rng.shuffle(ids)
        pieces = tokenizer.pieces(ids)
        assert "".join(pieces) == whole(ids) and len(pieces) == len(ids)
    assert tokenizer.pieces([]) == []
    assert tokenizer.pieces([tokenizer.vocab_size + 9, tokenizer.eos_id])[0] == ""  # an id without a token


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_the_last_token_of_a_character_has_it(ppo, kind):
    tokenizer = kind(ppo)
    text = "a b\n\u4f60\u597d 42. \U0001f44b\U0001f3fd e\u0301"
    ids = [*tokenizer.encode(text), tokenizer.eos_id]
    pieces = tokenizer.pieces(ids)
    assert "".join(pieces) == text + tokenizer.hf.eos_token and len(pieces) == len(ids)
    assert {"\u4f60", "\u597d", "\U0001f44b", "\U0001f3fd", tokenizer.hf.eos_token} <= {*pieces}
    ids = tokenizer.encode("\u4f60\u597d")
    n = len(tokenizer.encode("\u4f60"))  # with the space that some tokenizers put before a text
    assert tokenizer.pieces(ids) == [*[""] * (n - 1), "\u4f60", *[""] * (len(ids) - n - 1), "\u597d"] and n > 1


# --- The file


@pytest.mark.parametrize("env", ["Plain", "DenseTurns", "Constant"])
def test_numbers_of_tokens_are_those_of_the_experience(ppo, tmp_path, env):
    """DenseTurns has several turns. Every episode of Constant is without a reward."""
    flags = dict(env_kwargs='{"reward": null}') if env == "Constant" else {}
    seen = record(ppo, tmp_path, env_id=f"environments:{env}-v0", kl_coef=0.1, max_new_tokens=8, **flags)
    rows, completions = lines(seen.folder, "tokens"), lines(seen.folder, "completions")
    for i, (episodes, e) in enumerate(zip(seen.episodes, seen.experiences, strict=True)):
        samples = [row for row in rows if row["iteration"] == i]
        assert [row["sample"] for row in samples][:4] == [0, 1, 2, 3] and len(samples) in (4, 5)
        for sample in samples:
            episode, k = episodes[sample["sample"]], sample["sample"]
            assert sample.keys() - {"chosen", "reward"} == KEYS and ("chosen" in sample) == (k > 3)
            assert (sample["ids"], sample["response_starts"]) == (episode.ids, episode.response_starts)
            assert sample["mask"] == sample["trained"] == [int(x) for x in episode.mask]
            assert sample["tensors"].keys() == (set() if env == "Constant" else {*COLUMNS})
            for name in sample["tensors"].keys() - {"new_logprobs"}:
                expected = getattr(e, name)[k][e.mask[k]]
                torch.testing.assert_close(torch.tensor(sample["tensors"][name]), expected, rtol=1e-5, atol=1e-8)
            texts = "".join(message["content"] for message in episode.conversation)
            assert re.sub("<(eos|unk|pad)>", "", "".join(sample["text"])) == texts
        for sample, line in zip(samples, completions[4 * i : 4 * i + 4], strict=False):
            assert (sample["stop"], sample.get("reward")) == (line["stop"], line.get("reward"))
            assert sum(sample["mask"]) == line["n_tokens"]
    if env == "DenseTurns":
        assert max(len(row["response_starts"]) for row in rows) == 2


def test_the_sample_with_the_lowest_reward_is_added_and_marked_as_chosen(ppo, tmp_path):
    """But not where it is one of the first four. Samples without a reward are not meant."""
    step, steps = ppo.checked_step, iter([5, 4, 3, 2, 9, None, 1, 1.5, 7, 7, 7, 7, 8, 8, 8, 8])
    given = lambda result: (result[0], next(steps), *result[2:])
    in_order = lambda method, turns, envs: [ppo.play_turn(method, *turn) for turn in turns]
    with mock.patch.multiple(ppo, checked_step=lambda *args: given(step(*args)), in_threads=in_order):
        record(ppo, tmp_path, eval_episodes=0)
    found = [[(row["sample"], row["reward"], row.get("chosen")) for row in lines(tmp_path / "run", "tokens")
              if row["iteration"] == i] for i in (0, 1)]  # fmt: skip
    assert found[0][:4] == [(0, 5, None), (1, 4, None), (2, 3, None), (3, 2, None)]
    assert found[0][4:] == [(6, 1, "lowest reward")] and [row[0] for row in found[1]] == [0, 1, 2, 3]


def test_rank_0_chooses_the_sample_for_all_ranks(ppo, tmp_path):
    """Rewards may round differently on other ranks, and ranks with other samples would hang."""
    seen = record(ppo, tmp_path, num_iterations=1)
    [episodes], [experience], asked = seen.episodes, seen.experiences, []
    tokenizer, args = ppo.HFTokenizer.from_texts(["abcdef="]), ppo.fill_in_defaults(ppo.Args(**SMALL))
    asking = lambda model, experience, groups, args: asked.append(groups[0].tolist()) or experience.old_logprobs
    for rank, row in (0, 5), (1, 7):
        experience.rewards[row, -1] -= 9 + rank
        of_rank_0 = lambda x, rank=rank: x if rank == 0 else x + 5
        with mock.patch.multiple(ppo, RANK=rank, all_reduce=of_rank_0, logprobs_of_all=asking):
            samples = ppo.logged_tokens(episodes, experience, experience, None, tokenizer, args)
        assert len(samples) == (5 if rank == 0 else 0)
    assert asked == [[0, 1, 2, 3, 5]] * 2


def test_new_logprobs_are_those_of_the_trained_actor(ppo, tmp_path):
    seen = record(ppo, tmp_path, num_iterations=1, actor_lr=1e-2)
    [experience], args = seen.experiences, ppo.Args(device="cpu", micro_batch_tokens=64)
    rows = lines(seen.folder, "tokens")
    mb = experience.microbatch(torch.tensor([row["sample"] for row in rows]), "cpu")
    with torch.no_grad():
        expected, _ = seen.models["actor"].sampled_logprobs(mb, args.temperature)
    for row, new, mask in zip(rows, expected, mb.mask, strict=True):
        logged = torch.tensor(row["tensors"]["new_logprobs"])
        torch.testing.assert_close(logged, new[mask], rtol=1e-4, atol=1e-5)
        assert (logged - torch.tensor(row["tensors"]["old_logprobs"])).abs().max() > 1e-3


def test_a_run_is_the_same_to_the_last_bit_without_the_file(ppo, tmp_path):
    flags = dict(env_id="environments:TwoTurns-v0", save_every=2, kl_coef=0.1)
    train(ppo, tmp_path, run_name="with", **flags)
    with mock.patch.object(ppo, "logged_tokens", lambda *_: []):
        train(ppo, tmp_path, run_name="without", **flags)
    assert lines(tmp_path / "with", "tokens") and not lines(tmp_path / "without", "tokens")
    for name in "with", "without":
        (tmp_path / name / "tokens.jsonl").write_text("")
    assert_same(tmp_path / "with", tmp_path / "without")


def test_without_reference_and_critic(ppo, tmp_path):
    record(ppo, tmp_path, critic_epochs=0)
    for row in lines(tmp_path / "run", "tokens"):
        assert row["tensors"].keys() == {*COLUMNS} - {"ref_logprobs"} and {*row["tensors"]["values"]} == {0.0}


def test_a_tensor_of_a_fork_is_logged_and_what_is_not_finite_is_said(ppo, tmp_path):
    """The fork has four more fields. Two are no floats [N, T], and are not logged."""
    field, line = "    advantages: Tensor | None = None\n", "    experience.returns = returns\n"
    script = Path(ppo.__file__).read_text()
    assert script.count(field) == script.count(line) == 1
    names = "place", "broken", "count", "of_samples"
    script = script.replace(field, field + "".join(f"    {name}: Tensor | None = None\n" for name in names))
    script = script.replace(line, line + """
    experience.count = torch.arange(mask.shape[1]).repeat(len(mask), 1)
    experience.place = experience.count.float()
    experience.broken = torch.where(experience.count % 2 == 0, math.nan, -math.inf)
    experience.of_samples = experience.rewards.sum(1)
""")
    (tmp_path / "fork.py").write_text(script)
    spec = importlib.util.spec_from_file_location("fork", tmp_path / "fork.py")
    fork = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, fork=fork):
        spec.loader.exec_module(fork)
        record(fork, tmp_path)
    for row in lines(tmp_path / "run", "tokens"):
        places = [i for i, sampled in enumerate(row["mask"]) if sampled]
        assert row["tensors"].keys() == {*COLUMNS, "place", "broken"} - {"ref_logprobs"}
        assert row["tensors"]["place"] == places
        assert row["tensors"]["broken"] == [["nan", "-inf"][place % 2] for place in places]


def test_tokens_that_a_fork_does_not_train_on_are_told_apart(ppo, tmp_path):
    """It selects samples 6, 0 and 3 in this order, and of sample 0 leaves out the first token of the response."""
    seen = record(ppo, tmp_path, num_iterations=1)
    [episodes], [experience] = seen.episodes, seen.experiences
    rows = torch.tensor([6, 0, 3])
    trained = experience.select(rows)
    first = episodes[0].response_starts[0]
    trained.mask[1, first] = False
    experience.rewards[6, -1] -= 9  # so that it is the one with the lowest reward
    tokenizer, args = ppo.HFTokenizer.from_texts(["abcdef="]), ppo.fill_in_defaults(ppo.Args(**SMALL))
    samples = ppo.logged_tokens(episodes, experience, trained, seen.models["actor"], tokenizer, args)
    assert [sample["sample"] for sample in samples] == [0, 1, 2, 3, 6]
    for sample in samples:
        expected = sample["mask"] if sample["sample"] in (0, 3, 6) else [0] * len(sample["mask"])
        if sample["sample"] == 0:
            expected = [int(x and i != first) for i, x in enumerate(sample["mask"])]
        assert sample["trained"] == expected and sum(sample["mask"]) == len(sample["tensors"]["advantages"])


def test_of_a_long_sample_the_middle_is_left_out_and_the_line_says_so(ppo, tmp_path):
    flags = dict(env_id="environments:Lengths-v0", max_prompt_tokens=40, kl_coef=0.1)
    whole = record(ppo, tmp_path, run_name="whole", **flags).folder
    with mock.patch.object(ppo, "LOGGED_BYTES", 8_000):
        cut = record(ppo, tmp_path, run_name="cut", **flags).folder
    left_out = set()
    for a, b in zip(lines(whole, "tokens"), lines(cut, "tokens"), strict=True):
        first, end = b.get("left_out", [len(a["ids"])] * 2)
        assert "left_out" not in a and first <= end and end - first + len(b["ids"]) == len(a["ids"])
        kept = [*range(first), *range(end, len(a["ids"]))]
        for name in "ids", "text", "mask", "trained":
            assert b[name] == [a[name][i] for i in kept]
        sampled = [i for i, x in enumerate(a["mask"]) if x]
        for name, numbers in a["tensors"].items():
            assert b["tensors"][name] == [x for i, x in zip(sampled, numbers, strict=True) if i in kept]
        left_out.add(end - first)
    assert 0 in left_out and max(left_out) > 20
    rows = (cut / "tokens.jsonl").read_text().splitlines()
    for i in (0, 1):
        assert sum(len(row) for row in rows if json.loads(row)["iteration"] == i) < 8_000


def test_a_full_disk_ends_the_run_and_the_resumed_one_has_every_line_once(ppo, tmp_path):
    append = ppo.Run.append

    def full(run, name, row):
        if (name, row["iteration"], row.get("sample")) == ("tokens", 1, 2):
            with open(run.path / "tokens.jsonl", "a") as file:
                file.write('{"iteration": 1, "samp')
            raise OSError(28, "No space left on device")
        append(run, name, row)

    whole = train(ppo, tmp_path, run_name="whole")
    with mock.patch.object(ppo.Run, "append", full), pytest.raises(OSError, match="No space left"):
        train(ppo, tmp_path)
    assert_same(whole, train(ppo, tmp_path, resume="auto"))


@pytest.mark.slow
def test_five_ranks_write_the_file_of_one(ppo, tmp_path):
    """Also where some ranks have none of the samples that are logged."""
    flags = SMALL | dict(kl_coef=0.1, env_id="environments:DenseTurns-v0", log_dir=str(tmp_path), rollout_batch_size=4,
                         actor_lr=1e-3)  # fmt: skip
    distributed_worker.run(ppo, tmp_path, "one", flags)
    distributed_worker.run_on_ranks(ppo, tmp_path, 5, ("five", flags, None))
    assert_same_tokens(tmp_path / "five", tmp_path / "one")


def test_the_advantages_that_are_counted_for_blame_are_those_of_the_script(folder, tmp_path, capsys):
    args = json.loads((folder / "config.json").read_text())["args"] | dict(gamma=0.9)
    for row in lines(folder, "tokens"):
        tensors = row["tensors"]
        t = {name: torch.tensor(x)[None] for name, x in tensors.items()}
        rewards = t["rewards"] - args["kl_coef"] * (t["old_logprobs"] - t["ref_logprobs"])
        for lam in 0.0, 0.5, 1.0:
            expected, _ = ppo_llm.compute_gae(rewards, t["values"], rewards == rewards, 0.9, lam)
            found = blame.advantages(blame.td_errors(tensors, args), args, lam)
            assert found == pytest.approx(expected[0].tolist(), rel=1e-4, abs=1e-5)

    def sorting(row):  # "31=" is answered by "12": one right digit, then a wrong one that the critic did not expect
        tensors = dict.fromkeys(row["tensors"], [0.0] * 2) | dict(rewards=[0.5, 0.0], values=[1.0, 0.7])
        return row | dict(text=[*"31=12"], mask=[0, 0, 0, 1, 1], response_starts=[3], tensors=tensors)

    run = rewritten(folder, tmp_path / "run", tokens=sorting)
    blame.main(run, 2)
    shown = capsys.readouterr().out
    count = sum("chosen" not in row for row in lines(run, "tokens") if row["iteration"] > 0)
    assert f"| the last right one | 0% of {count} | 100% of {count} | 100% of {count} |" in shown
    assert f"| the first wrong one | 100% of {count} |" in shown and f"| 1 | 0.00 | {count} |" in shown


# --- Special tokens within a response


def test_the_share_of_samples_with_special_tokens_other_than_the_stop(ppo):
    """Prompts and the environment's messages may have them, and samples without a reward do not count."""
    tokenizer = ppo.HFTokenizer.from_texts(["12="])
    pad, eos, unk, one = (tokenizer.backend.token_to_id(x) for x in ("<pad>", "<eos>", "<unk>", "1"))
    assert tokenizer.special_ids == {pad, unk}

    def episode(ids, sampled, stop="terminated"):
        return types.SimpleNamespace(ids=ids, mask=sampled, stop=stop)

    T, F = True, False
    episodes = [
        episode([unk, one, eos], [F, T, T]),  # in the prompt
        episode([one, one, eos, pad, one, eos], [F, T, T, F, T, T]),  # in a message
        episode([one, unk, one, eos], [F, T, T, T]),
        episode([one, one, pad], [F, T, T], "length"),  # as the last token
        episode([one, unk, eos], [F, F, F], "unscored"),
    ]
    assert ppo.special_token_share(episodes, tokenizer) == 2 / 4
    assert ppo.special_token_share(episodes[-1:], tokenizer) == 0.0
    assert tokenizer.decode(episodes[2].ids) == "11"  # The reward does not see it.


def test_the_share_of_special_tokens_is_logged(ppo, tmp_path):
    seen = record(ppo, tmp_path, rollout_batch_size=16)
    special = {0, 2}  # <pad>, <unk>
    for row, episodes in zip(seen.rows, seen.episodes, strict=True):
        found = [bool({i for i, m in zip(e.ids, e.mask, strict=True) if m} & special) for e in episodes]
        assert row["objective/special_tokens"] == sum(found) / 16
    assert seen.rows[0]["objective/special_tokens"] > 0


# --- The page

SIGNS = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>__DATA__ &lt;"
HOSTILE = SIGNS + "\u2028\u202e\x00\ud800"  # that order others, end strings of JavaScript, or are no characters


class Parsed(html.parser.HTMLParser):
    """The elements of a page, and the texts of those with an id."""

    def __init__(self, page: bytes):
        super().__init__()
        self.elements, self.texts, self.now = [], {}, None
        self.feed(page.decode("ascii"))

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.now = dict(attributes).get("id", tag)

    def handle_data(self, data):
        self.texts[self.now] = self.texts.get(self.now, "") + data


def data_of(page: bytes) -> dict:
    return json.loads(Parsed(page).texts["data"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run of several turns, with rewards within them."""
    flags = dict(env_id="environments:DenseTurns-v0", kl_coef=0.1, num_iterations=3, eval_episodes=4, actor_lr=5e-3)
    return record(ppo_llm, tmp_path_factory.mktemp("look"), **flags, max_new_tokens=9).folder


def rewritten(folder, target, **changes):
    """A copy of a run in which each row of <name>.jsonl is change(row)."""
    copy = shutil.copytree(folder, target)
    for name, change in changes.items():
        rows = [json.dumps(change(row)) + "\n" for row in lines(folder, name)]
        (copy / f"{name}.jsonl").write_text("".join(rows))
    return copy


def hostile_run(folder, target):
    """A copy with a hostile text in everything that comes from a model, an environment, a command or a fork."""
    texts = dict.fromkeys(("prompt", "response", "stop", "chosen"), HOSTILE) | dict(reward=math.nan)  # not JSON
    tensors = lambda row: {HOSTILE: row["tensors"]["rewards"], **row["tensors"]}
    run = rewritten(
        folder, target,
        completions=lambda row: row | texts,
        tokens=lambda row: row | texts | {"text": [HOSTILE] * len(row["text"]), "tensors": tensors(row)},
        metrics=lambda row: row | {"ratio/diagnosis": HOSTILE, f"env/{HOSTILE}": 1.0},
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    args = config["args"] | {"env_id": HOSTILE, HOSTILE: HOSTILE}
    more = {"args": args, "argv": ["ppo_llm.py", HOSTILE], "script": HOSTILE, "commit": HOSTILE}
    (run / "config.json").write_text(json.dumps(config | more))
    summary = json.loads((folder / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"status": HOSTILE}))
    return run


def test_the_page_has_what_the_files_have(folder):
    [run] = data_of(look.make_page([folder]))["runs"]
    metrics, tokens = lines(folder), lines(folder, "tokens")
    assert (run["status"], run["done"], run["every"], run["iterations"]) == ("completed", 3, 1, [0, 1, 2])
    for name, values in run["metrics"].items():
        assert [x is not None for x in values] == [name in row for row in metrics]
        given = [row[name] for row in metrics if name in row]
        assert [x for x in values if x is not None] == pytest.approx(given, rel=1e-4)
    assert "ratio/steps" not in run["metrics"] and {"objective/reward", "objective/special_tokens"} < {*run["metrics"]}
    summary = json.loads((folder / "summary.json").read_text())
    assert (run["before"], run["after"]) == (summary["eval_before"], summary["eval_after"])
    shown = [{"iteration": int(i), **sample} for i, samples in run["samples"].items() for sample in samples]
    assert shown == tokens
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] in run["version"]


def test_flags_that_differ_from_the_defaults(folder):
    args = json.loads((folder / "config.json").read_text())["args"]
    changed = look.changed_flags(args, [])
    assert changed["env_id"] == ("environments:DenseTurns-v0", "SortDigits-v0") and changed["sft_steps"] == (0, 150)
    assert not {"actor_lr", "critic_epochs", "max_prompt_tokens", "compile", "run_name", "seed", "dtype"} & (
        changed.keys() - {"actor_lr"})  # fmt: skip
    assert look.changed_flags(args | dict(critic_epochs=0), [])["critic_epochs"] == (0, 2)
    assert look.changed_flags(args, ["ppo_llm.py", "--compile=off"])["compile"] == ("off", "auto")
    assert look.changed_flags(args | dict(mine=3), [])["mine"] == (3, None)  # a flag of a fork
    assert look.changed_flags(args | dict(model="DIR", max_prompt_tokens=512), [])["model"] == ("DIR", None)
    assert "max_prompt_tokens" not in look.changed_flags(args | dict(model="DIR", max_prompt_tokens=512), [])


def test_the_texts_of_the_page_are_in_the_manual():
    """Each metric of a chart, cause and quantity has one, and the template has none of its own."""
    manual, template = look.read_manual(), look.TEMPLATE.read_text()
    shown = re.search(r"(?s)const MAIN = \[(.*?)\];", template)[1]
    assert {*re.findall(r'"(\w+/\w+)"', shown)} <= manual["meanings"].keys()
    assert ppo_llm.ADVICE.keys() == manual["causes"].keys()
    assert {"objective/truncated", "actor/clipfrac", "actor/skipped"} <= manual["signs"].keys()
    keys = [key for key, *_ in manual["quantities"]]
    derived = re.findall(r"\w+", re.search(r"(?s)const OF_TENSORS = \{(.*?)\n\}", template)[1])
    known = {"trained", "old_logprobs", "ref_logprobs", "rewards", "values", "returns", "advantages", "<name>"}
    assert known < {*keys} and {*keys} - known <= {*derived} and {"kl", "gae", "clipped"} <= {*keys}
    for _, name, text in manual["quantities"]:
        assert len(text) > 30 and text not in template and name


def test_no_text_can_end_its_element(folder, tmp_path):
    name = SIGNS.replace("/", "")
    ours, theirs = (Parsed(look.make_page([run])) for run in (folder, hostile_run(folder, tmp_path / name)))
    assert theirs.elements == ours.elements and theirs.texts["title"].strip() == name
    [run] = json.loads(theirs.texts["data"])["runs"]
    assert run["samples"]["0"][0]["text"][0] == HOSTILE and "\ud800" in run["command"] and HOSTILE in run["version"]


def test_nothing_but_the_script_of_the_page_may_run_and_nothing_be_loaded(folder):
    page = look.make_page([folder]).decode("ascii")
    [policy] = re.findall(r'Content-Security-Policy"\s*content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "__" not in policy
    for kind in "style", "script":
        [text] = re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", page)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\bstyle=|https?://(?!www.w3.org)"
    assert not re.search(forbidden, look.TEMPLATE.read_text())


def test_a_summary_of_an_earlier_process_is_not_shown(folder, tmp_path):
    """The run has been resumed since, and was killed. NaN in a summary is a text."""
    run = shutil.copytree(folder, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"eval_after": {"accuracy": math.nan}}))
    [shown] = data_of(look.make_page([run], largest=0))["runs"]
    assert (shown["status"], shown["after"]["accuracy"]) == ("completed", "NaN")
    (run / "summary.json").write_text(json.dumps(summary | {"iterations": summary["iterations"] - 1}))
    [shown] = data_of(look.make_page([run]))["runs"]
    assert (shown["status"], shown["after"]) == ("ended without a summary", None)


def test_runs_that_go_on_are_damaged_or_old_have_a_page(folder, tmp_path):
    run = shutil.copytree(folder, tmp_path / "run")
    (run / "summary.json").unlink()
    for name in "metrics", "tokens":  # The last line is being written.
        text = (run / f"{name}.jsonl").read_text()
        (run / f"{name}.jsonl").write_text(text[: -len(text.splitlines()[-1]) // 2])
    [shown] = data_of(look.make_page([run]))["runs"]
    assert (shown["status"], shown["done"], shown["after"]) == ("ended without a summary", 2, None)
    assert shown["before"]["accuracy"] == lines(folder)[0]["eval/accuracy"]
    last = [sample for sample in shown["samples"]["2"] if "text" not in sample]
    assert len(last) < 2 and all("response" in sample for sample in last)
    (run / "tokens.jsonl").unlink()  # as scripts of earlier versions
    [shown] = data_of(look.make_page([run]))["runs"]
    assert all("response" in sample for samples in shown["samples"].values() for sample in samples)
    for name in "metrics", "completions":
        (run / f"{name}.jsonl").write_text("")
    [shown, _] = data_of(look.make_page([run, folder]))["runs"]
    assert (shown["samples"], shown["done"]) == ({}, 0)
    with pytest.raises(SystemExit, match="is it the folder of a run"):
        look.make_page([tmp_path])


def test_a_run_that_goes_on_is_seen_by_its_lock(folder, tmp_path):
    run = shutil.copytree(folder, tmp_path / "run")
    with open(run / "lock", "w") as file:  # Locks of flock belong to the open file, so this process sees its own.
        fcntl.flock(file, fcntl.LOCK_EX)
        assert look.is_running(run) and data_of(look.make_page([run]))["runs"][0]["status"] == "running"
    assert not look.is_running(run) and not look.is_running(tmp_path)


def test_of_a_long_run_samples_are_left_out(folder):
    whole, part = look.make_page([folder]), look.make_page([folder], largest=12_000)
    [run] = data_of(part)["runs"]
    assert run["every"] > 1 and run["samples"].keys() == {"0", "2"} and len(part) < len(whole)


def test_warnings_say_what_the_manual_says():
    rows = [{"iteration": i, "ratio/diagnosis": "advantage_zero" if i in (0, 1, 4) else None} for i in range(20)]
    rows[3]["actor/skipped"] = rows[19]["objective/truncated"] = 0.5
    manual = look.read_manual()
    found = look.warnings(rows, {"dtype": "float32", "temperature": 1.0}, manual)
    meaning, advice = manual["causes"]["advantage_zero"]
    assert found[0] == f"ratio: advantage_zero in iteration 1 to 2, 5. {meaning}. What to do: {advice}."
    assert found[1].startswith("actor/skipped is above 0 in iteration 4. actor/skipped or critic/skipped is above 0: ")
    assert found[2].startswith("objective/truncated is 0.25 in the last 2 iterations. ") and len(found) == 3
    assert look.warnings(rows[5:9], {}, manual) == []


# --- The page in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window, driven by selenium: apt-get install chromium chromium-driver; pip install selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if not path]:
        pytest.skip(f"needs {' and '.join(missing)}")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    profile = tmp_path_factory.mktemp("profile")
    for flag in "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}":
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs["chromedriver"]))
    yield driver
    driver.quit()


class Page:
    """A page that is open in the browser."""

    def __init__(self, driver, folders, path, width=1200):
        self.driver, self.path = driver, path
        path.write_bytes(look.make_page(folders))
        size = dict(width=width, height=1500, deviceScaleFactor=1, mobile=False)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for kind in "browser", "performance":  # of the page before
            driver.get_log(kind)
        driver.get(path.as_uri())

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def text(self, css):
        return self.driver.execute_script("return document.querySelector(arguments[0]).textContent", css)

    def press(self, keys):
        for key in keys:
            self.driver.find_element("css selector", "body").send_keys(key)

    def choose(self, key):
        option = self.all(f"#by option[value='{key}']")
        option[0].click()

    def row(self, key):
        """{index of the token: text} of a row of the table."""
        cells = self.all(f"#numbers tr[data-by='{key}'] td[data-i]")
        return {int(cell.get_attribute("data-i")): cell.get_attribute("textContent") for cell in cells}

    def errors(self):
        return self.driver.get_log("browser")

    def requests(self):
        """The addresses that the page has asked for. The first tab of a browser asks for others."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        ours = [x["request"]["url"] for x in sent if x["documentURL"].startswith(self.path.as_uri())]
        return {url.partition("#")[0] for url in ours}


LEFT, RIGHT, DOWN = "\ue012", "\ue014", "\ue015"  # the arrow keys of WebDriver


def expected_rows(sample, args):
    """The numbers of the table, computed from the row of the file and with the script's own functions."""
    t = {name: torch.tensor(x) for name, x in sample["tensors"].items()}
    kl = t["old_logprobs"] - t["ref_logprobs"]
    rewards = t["rewards"] - args["kl_coef"] * kl
    chain = lambda x: x[None]
    mask = torch.ones(1, len(kl), dtype=torch.bool)
    advantages = lambda lam: ppo_llm.compute_gae(chain(rewards), chain(t["values"]), mask, args["gamma"], lam)[0][0]
    ratio = (t["new_logprobs"] - t["old_logprobs"]).exp()
    clip = ratio.clamp(1 - args["clip_low"], 1 + args["clip_high"])
    losses = -torch.minimum(ratio * t["advantages"], clip * t["advantages"])
    return t | {
        "kl": kl, "net_rewards": rewards, "td_errors": advantages(0.0), "gae": advantages(args["gae_lambda"]),
        "ratio": ratio, "loss": losses, "sampler_gap": t["sampler_logprobs"] - t["old_logprobs"],
    }  # fmt: skip


@pytest.mark.slow
def test_iteration_quantity_and_token_that_are_clicked_show_the_numbers_of_the_file(browser, folder, tmp_path):
    page = Page(browser, [folder], tmp_path / "page.html")
    args = json.loads((folder / "config.json").read_text())["args"]
    assert page.text("#where") == "iteration 3"  # the newest
    chart = page.all("figure[data-metric='objective/reward'] svg")[0]
    click_at(browser, chart, 0.5)
    assert page.text("#where") == "iteration 2"
    shown = page.text("figure[data-metric='objective/reward'] output")
    assert float(shown) == pytest.approx(lines(folder)[1]["objective/reward"], rel=0.005)
    samples = [row for row in lines(folder, "tokens") if row["iteration"] == 1]
    assert len(page.all("article")) == len(samples)
    for k, sample in enumerate(samples):
        page.all(f"article[data-k='{k}']")[0].click()
        assert page.text("#subject") == f"Numbers of sample {k + 1} of iteration 2"
        sampled = [i for i, x in enumerate(sample["mask"]) if x]
        for key, numbers in expected_rows(sample, args).items():
            if key in ("sampler_logprobs", "new_logprobs"):
                continue
            cells = page.row(key)
            assert {i for i, text in cells.items() if text != "\u00b7"} == {*sampled}
            found = [float(cells[i]) for i in sampled]
            assert found == pytest.approx(numbers.tolist(), rel=0.05 if key == "sampler_gap" else 1e-3, abs=6e-4), key
        assert [page.row("trained")[i] for i in sampled] == ["1"] * len(sampled)
        total = page.all("#numbers tr[data-by='kl'] td.sum")[0].text
        assert float(total) == pytest.approx(sum(expected_rows(sample, args)["kl"].tolist()), abs=1e-3)
    page.choose("advantages")
    k = max(k for k, sample in enumerate(samples) if sum(sample["mask"]) > 1)
    place = [i for i, x in enumerate(samples[k]["mask"]) if x][1]
    page.all(f"article[data-k='{k}'] [data-i='{place}']")[0].click()
    said = page.text("#said")
    assert f"token {place}, id {samples[k]['ids'][place]}, trained on" in said
    number = float(re.search(r"(?<=, advantage )-?[\d.]+(?:e-?\d+)?", said)[0])
    assert number == pytest.approx(samples[k]["tensors"]["advantages"][1], abs=6e-4)
    at = page.all(".at")
    assert {x.get_attribute("data-i") for x in at} == {str(place)} and len(at) > 2
    browser.refresh()
    assert page.text("#where") == "iteration 2" and page.all("#by")[0].get_attribute("value") == "advantages"
    assert not page.errors() and page.requests() == {page.path.as_uri()}


def click_at(driver, element, share):
    """Click into an element, at this share of its width."""
    from selenium.webdriver import ActionChains

    offset = round((share - 0.5) * element.size["width"])
    ActionChains(driver).move_to_element_with_offset(element, offset, 0).click().perform()


@pytest.mark.slow
def test_all_is_reached_by_keys(browser, folder, tmp_path):
    page = Page(browser, [folder], tmp_path / "page.html")
    page.press([LEFT, LEFT, RIGHT, LEFT])
    assert page.text("#where") == "iteration 1"
    page.press([DOWN, DOWN])
    assert page.all("article.chosen")[0].get_attribute("data-k") == "2"
    page.press("4")
    keys = [key for key, *_ in look.read_manual()["quantities"]]
    assert page.all("#by")[0].get_attribute("value") == keys[3] == "kl"
    page.press("...,")
    assert {x.get_attribute("data-i") for x in page.all("#samples .at")} == {"1"}
    numbered = lambda: "numbered" in page.all("#samples")[0].get_attribute("class")
    before = numbered()
    page.press("n")
    assert numbered() != before
    reached = set()
    for _ in range(60):
        page.press("\ue004")  # Tab
        reached.add(page.driver.execute_script("let e = document.activeElement; return e.id || e.tagName"))
    assert {"all", "FIGURE", "back", "slider", "next", "by", "numbered", "ARTICLE", "numbers"} <= reached
    page.all("figure[data-metric='actor/clipfrac']")[0].send_keys("")
    page.driver.execute_script("document.querySelector(\"figure[data-metric='actor/clipfrac']\").focus()")
    manual = look.read_manual()
    assert manual["meanings"]["actor/clipfrac"] in page.text("#explained")
    assert manual["signs"]["actor/clipfrac"][0] in page.text("#explained")
    assert not page.errors()


@pytest.mark.slow
def test_the_advantage_at_another_lambda(browser, folder, tmp_path):
    page = Page(browser, [folder], tmp_path / "page.html")
    page.choose("gae")
    args = json.loads((folder / "config.json").read_text())["args"]
    sample = next(row for row in lines(folder, "tokens") if row["iteration"] == 2)
    sampled = [i for i, x in enumerate(sample["mask"]) if x]
    box = page.all("#lambda")[0]
    box.clear()
    box.send_keys("0.5\ue007")  # Enter
    expected = expected_rows(sample, args | dict(gae_lambda=0.5))["gae"].tolist()
    assert [float(page.row("gae")[i]) for i in sampled] == pytest.approx(expected, rel=1e-3, abs=6e-4)
    assert not page.errors()


@pytest.mark.slow
def test_hostile_texts_are_shown_and_do_nothing(browser, folder, tmp_path):
    name = SIGNS.replace("/", "")
    page = Page(browser, [hostile_run(folder, tmp_path / name), folder], tmp_path / "page.html")
    for _ in range(2):
        shown = page.driver.execute_script("return document.body.textContent.replace(/\\s+/g, ' ')")
        assert "owned" not in page.driver.title.replace("document.title='owned'", "")
        assert not page.all("img") and shown.count("<img src=x onerror=") > 20
        page.all("#all")[0].click()  # with the charts of all metrics
    for css in "h1", ".badge", "header code", "ul.warnings", "article", "#numbers", "#charts", "#by", "#runs button":
        assert "<img src=x onerror=" in page.text(css), css
    assert not {*"\u202e\u2028\x00"} & {*shown}
    assert "\u27e82028\u27e9\u27e8202e\u27e9\u27e80000\u27e9\u27e8d800\u27e9" in shown
    page.press([LEFT, DOWN, *"123456789.,n"])
    assert not page.errors() and page.requests() == {page.path.as_uri()}
    # The policy refuses what would run if a text were parsed.
    page.driver.execute_script("document.body.innerHTML += arguments[0]", SIGNS)
    page.driver.execute_script("let s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s)")  # noqa: E501
    assert page.driver.title != "owned" and page.driver.title != "1"
    assert any("Content Security Policy" in entry["message"] for entry in page.errors())


@pytest.mark.slow
def test_it_is_readable_without_red_and_green_without_colour_dark_and_narrow(browser, folder, tmp_path):
    """Above and below zero differ in colour also for people who see no red or no green, and by hatching without any."""
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    signs = rewritten(folder, tmp_path / "signs", tokens=lambda row: row | {"tensors": row["tensors"] | {
        "advantages": [(-1.0) ** i for i in range(sum(row["mask"]))]}, "text": [" "] * len(row["text"])})  # fmt: skip
    page = Page(browser, [signs], tmp_path / "page.html", width=700)
    page.choose("advantages")
    width = page.driver.execute_script("return document.scrollingElement.scrollWidth")
    assert width <= 700
    sample = next(row for row in lines(signs, "tokens") if row["iteration"] == 2)
    first = sample["mask"].index(1)
    emulate = page.driver.execute_cdp_cmd

    def pixels(i):  # of a cell of the table, without its number
        cell = page.all(f"#numbers tr[data-by='advantages'] td[data-i='{i}']")[0]
        page.driver.execute_script("arguments[0].textContent = ''", cell)
        picture = image.open(io.BytesIO(cell.screenshot_as_png)).convert("RGB")
        inner = picture.crop((2, 2, picture.width - 2, picture.height - 3))
        return torch.tensor([*inner.tobytes()]).view(-1, 3).float()

    for scheme in "light", "dark":
        emulate("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        for kind in "none", "protanopia", "deuteranopia", "achromatopsia":
            emulate("Emulation.setEmulatedVisionDeficiency", {"type": kind})
            above, below = pixels(first), pixels(first + 1)
            assert above.std(0).max() < 3 and below.std(0).max() > 8, (scheme, kind)  # plain, hatched
            if kind != "achromatopsia":
                assert (above.mean(0) - below.mean(0)).norm() > 60, (scheme, kind)
    emulate("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
    emulate("Emulation.setEmulatedMedia", {"features": []})
    assert not page.errors()


@pytest.mark.slow
def test_old_runs_and_samples_with_a_gap_and_forks_have_a_page(browser, folder, tmp_path):
    old = shutil.copytree(folder, tmp_path / "old")
    (old / "tokens.jsonl").unlink()
    page = Page(browser, [old], tmp_path / "old.html")
    assert "no tokens.jsonl" in page.text("#help") and len(page.all("article")) == 4
    assert not page.errors()

    def with_gap(row):  # Tokens 2 and 3 of the response are left out. A fork trains on no sample but the first.
        n, first = len(row["ids"]), row["mask"].index(1) + 1
        kept = [i for i in range(n) if i not in (first, first + 1)]
        left = [i for i in range(sum(row["mask"])) if i not in (1, 2)]
        lists = {name: [row[name][i] for i in kept] for name in ("ids", "text", "mask", "trained")}
        tensors = {name: [x[i] for i in left] for name, x in row["tensors"].items()}
        if row["sample"] > 0:
            lists["trained"] = [0] * len(kept)
        more = {"left_out": [first, first + 2], "tensors": tensors | {"mine": ["nan"] * len(left)}}
        return row | lists | more

    gaps = rewritten(folder, tmp_path / "gaps", tokens=with_gap)
    page = Page(browser, [gaps, old], tmp_path / "gaps.html")
    assert page.text("article .gap").strip("\u2026 ") == "2 tokens are left out"
    badges = [x.get_attribute("textContent") for x in page.all("article .badge")]
    assert badges.count("not trained on") == len(page.all("article")) - 1
    assert not page.all("article[data-k='0'] .unused") and page.all("article[data-k='1'] .unused")
    sample = next(row for row in lines(gaps, "tokens") if row["iteration"] == 2)
    first = sample["left_out"][0]
    assert page.row("td_errors")[first - 1] == "\u00b7" != page.row("td_errors")[first]  # Its next value is unknown.
    assert page.row("mine")[first] == "nan"
    page.all(f"article[data-k='0'] [data-i='{first}']")[0].click()
    assert f"token {first + 2}, id {sample['ids'][first]}, trained on" in page.text("#said")
    curves = page.all("figure[data-metric='objective/reward'] path")  # of both runs, with different dashes
    assert len({curve.value_of_css_property("stroke-dasharray") for curve in curves}) == len(curves) == 2
    page.all("#runs button")[1].click()
    assert page.text("h1") == "old" and "no tokens.jsonl" in page.text("#help")
    assert not page.errors()


def assert_shown(browser, where, state):
    """Wait for what a page that loads itself anew has to show; between two loads its elements are missing, or stale."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(browser):
        texts = [browser.find_element("id", name).text for name in ("where", "head")]
        return texts[0] == where and state in texts[1]

    wait = WebDriverWait(browser, 30, ignored_exceptions=[StaleElementReferenceException])
    wait.until(shown, f"the page does not show {where}, {state}")


@pytest.mark.slow
def test_a_page_that_is_watched_follows_the_run(browser, folder, tmp_path):
    run = rewritten(folder, tmp_path / "run")
    for name in "metrics", "completions", "tokens":
        rows = [row for row in lines(folder, name) if row["iteration"] < 2]
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, look.__file__, str(run), "--watch"]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert "page.html" in watching.stdout.readline()
            browser.get((run / "page.html").as_uri())
            assert_shown(browser, "iteration 2", "running")
            for name in "metrics", "completions", "tokens":
                shutil.copy(folder / f"{name}.jsonl", run)
            lock.close()  # The run ends, so the page is written for the last time.
            assert watching.wait(30) == 0
            assert_shown(browser, "iteration 3", "completed")
        finally:
            watching.kill()
