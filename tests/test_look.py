"""tokens.jsonl has what was computed for every token; benchmarks/look.py shows it on a page that no text can break."""

import json
import math
import random
import re
import types
from unittest import mock

import distributed_worker
import pytest
import tokenizers
import torch
import transformers
from test_checkpoints import assert_same, train
from test_train import SMALL, changed, lines, record

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
    for _ in range(100):
        ids = rng.choices(range(tokenizer.vocab_size), k=30)
        pieces = tokenizer.pieces(ids)
        assert "".join(pieces) == whole(ids) and len(pieces) == 30
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
    assert pieces[ids.index(ids[-2])] and pieces.count("") > 8
    start = "".join(pieces).index("\u4f60")
    assert "".join(pieces[: pieces.index("\u4f60") + 1]) == text[: start + 1]


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
    def with_more(experience):
        places = torch.arange(experience.mask.shape[1]).expand(experience.mask.shape)
        experience.place = places.float()
        experience.broken = torch.where(places % 2 == 0, math.nan, -math.inf)
        experience.count, experience.of_samples = places, experience.rewards.sum(1)  # no floats, no [N, T]
        return experience

    with mock.patch.object(ppo, "make_experience", changed(ppo.make_experience, with_more)):
        record(ppo, tmp_path)
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


def assert_same_tokens(folder, other, after=0):
    """From iteration `after` on, the same but for rounding."""
    rows, others = ([row for row in lines(x, "tokens") if row["iteration"] >= after] for x in (folder, other))
    assert len(rows) == len(others) > 0
    for a, b in zip(rows, others, strict=True):
        assert {k: x for k, x in a.items() if k not in ("tensors", "reward")} == {
            k: x for k, x in b.items() if k not in ("tensors", "reward")}  # fmt: skip
        for name in a["tensors"].keys() | b["tensors"].keys():
            assert a["tensors"][name] == pytest.approx(b["tensors"][name], rel=1e-3, abs=1e-4), name


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
