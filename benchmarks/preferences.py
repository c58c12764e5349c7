"""A reward model from preferences, and PPO that drives it too far: learned and true reward over the KL.

    python benchmarks/checkpoints.py smollm2 DIR
    python benchmarks/preferences.py pairs DIR             # 40 minutes: pairs of answers, compared
    python benchmarks/preferences.py reward-model DIR 300  # 20 minutes: learns from the first 300 pairs
    python benchmarks/preferences.py ppo DIR 300 0.05 1    # 55 minutes: pairs, weight of the KL, seed; can be resumed
    python benchmarks/preferences.py plot                  # prints tables, draws pictures/preferences.png
    python benchmarks/preferences.py look DIR              # do the trained models still answer the question?

Minutes are those of one core. Pairs, models and runs stay in runs/preferences, results in data/preferences.jsonl.
The true reward is the sentiment of an answer, -1 to 1, by VADER's lexicon and rules, which stands in for the people who
compare answers (as a larger reward model does in Gao et al. 2022, https://arxiv.org/abs/2210.10760). Training sees it
only through the comparisons: the reward model learns by Bradley and Terry's model that the better answer of each pair
is to get the higher score (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.1).
"""

import collections
import functools
import json
import re
import statistics
import sys
import unittest.mock
import warnings
from pathlib import Path

import common
import numpy as np
import tasks
import torch
import torch.nn.functional as F
from common import ppo_llm

FOLDER, RESULTS = Path("runs/preferences"), common.DATA / "preferences.jsonl"
ASK = ("Tell me about {}.", "Write a short text about {}.", "What do you think of {}?", "Describe {}.",
       "Say something about {}.", "What comes to your mind when you think of {}?")  # fmt: skip
TOKENS, PASSES, HELD_OUT_PASSES = 24, 10, 6
BATCH, LEARNING_RATE = 8, 5e-5  # of the reward model
MEAN_OF = 4  # iterations: a point of a curve
FLAGS = dict(env_id="Prompts-v0", rollout_batch_size=32, train_batch_size=16, max_prompt_tokens=64, save_every=4,
             max_new_tokens=TOKENS, micro_batch_tokens=1024, num_iterations=24, actor_lr=2e-5, eval_every=12,
             eval_episodes=60)  # fmt: skip


def prompts(split: str) -> list[str]:
    return [ask.format(topic) for topic in tasks.split_rows(tasks.TOPICS, split) for ask in ASK]


@functools.cache
def analyzer():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment(text: str) -> float:
    return analyzer().polarity_scores(text)["compound"]


def conversation(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def answers(folder: str, questions: list[str], seeds, iteration: int) -> list[tuple[str, str]]:
    """(question, sampled answer) of the questions with these numbers."""
    model, _ = ppo_llm.load_hf_checkpoint(folder)
    tokenizer = ppo_llm.HFTokenizer(folder)
    args = ppo_llm.Args(max_prompt_tokens=64, max_new_tokens=TOKENS)
    decoder = ppo_llm.Decoder(model, 64, tokenizer.stop_ids, args)
    envs = [common.Prompts(questions) for _ in range(64)]
    episodes = ppo_llm.rollout_share(decoder, tokenizer, envs, seeds, range(len(seeds)), iteration, args)
    return [tuple(message["content"] for message in episode.conversation) for episode in episodes]


def make_pairs(folder: str) -> None:
    """Two answers to each prompt, several times over, and which of them is better; no pairs without a difference."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split, passes in ("train", PASSES), ("test", HELD_OUT_PASSES):
        questions = prompts(split)
        with open(FOLDER / f"prompts_{split}.jsonl", "w") as file:
            file.writelines(json.dumps({"prompt": question}) + "\n" for question in questions)
        pairs = []
        for k in range(passes):
            seeds = [i for i in range(len(questions)) for _ in range(2)]
            scored = [(prompt, sentiment(text), text) for prompt, text in answers(folder, questions, seeds, k)]
            for two in zip(scored[::2], scored[1::2]):
                (prompt, low, worse), (_, high, better) = sorted(two)
                if high > low:
                    pairs.append({"prompt": prompt, "better": better, "worse": worse})
            print(split, k, len(pairs), file=sys.stderr, flush=True)
        name = "pairs" if split == "train" else "pairs_test"
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def make_reward_model(folder: str, count: int) -> None:
    """By transformers, one epoch over the pairs, or more if they are few; then the scores get a deviation of 1."""
    import transformers

    tokenizer = ppo_llm.HFTokenizer(folder)
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    # A head of zeros would take the first hundred steps to reach scores that tell answers apart.
    torch.nn.init.normal_(model.score.weight, std=(model.config.hidden_size + 1) ** -0.5)
    model.config.pad_token_id = tokenizer.hf.convert_tokens_to_ids("<|endoftext|>")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def scores(pairs: list[dict]) -> torch.Tensor:
        """[2, pairs], of the better answers and of the worse ones."""
        texts = [(pair["prompt"], pair[side]) for side in ("better", "worse") for pair in pairs]
        ids = [tokenizer.encode_conversation(conversation(*pair)) for pair in texts]
        rows = [torch.tensor(row) for row in ids]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
        return model(tokens, attention_mask=tokens != model.config.pad_token_id).logits.view(2, len(pairs))

    pairs, held_out = (common.read_lines(FOLDER / f"{name}.jsonl") for name in ("pairs", "pairs_test"))
    pairs = pairs[:count]
    assert len(pairs) == count, f"there are {len(pairs)} pairs"
    epochs = max(1, round(1000 / count))
    steps = [rows for _ in range(epochs) for rows in torch.randperm(count).split(BATCH)]
    for i, rows in enumerate(steps):
        better, worse = scores([pairs[k] for k in rows])
        loss = -F.logsigmoid(better - worse).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - i / len(steps))
        optimizer.step()
        optimizer.zero_grad()
        print(f"{i + 1}/{len(steps)}: loss {float(loss):.3f}", file=sys.stderr, flush=True)
    with torch.no_grad():
        parts = [scores(held_out[i : i + BATCH]) for i in range(0, len(held_out), BATCH)]
        better, worse = torch.cat(parts, dim=1)
        model.score.weight /= torch.cat((better, worse)).std()
    agreement = float((better > worse).float().mean())
    target = FOLDER / f"rm_{count}"
    model.save_pretrained(target)
    tokenizer.hf.save_pretrained(target)
    (target / "agreement.json").write_text(json.dumps({"held_out_pairs": len(held_out), "agreement": agreement}))
    print(f"{target}: agrees with {agreement:.1%} of {len(held_out)} held-out pairs")


def ppo(folder: str, count: int, kl_coef: float, seed: int) -> dict:
    """The run's settings, some metrics of its iterations, and some answers."""
    name = f"{count}_{kl_coef:g}_{seed}"
    metrics = ppo_llm.iteration_metrics

    def with_true_reward(episodes, *rest):  # which is a metric, and nothing else
        true_reward = statistics.mean(sentiment(e.conversation[-1]["content"]) for e in episodes)
        return metrics(episodes, *rest) | {"objective/true_reward": true_reward}

    flags = FLAGS | dict(model=folder, reward_model=str(FOLDER / f"rm_{count}"), kl_coef=kl_coef, seed=seed)
    flags["critic_model"] = flags["reward_model"]
    flags["env_kwargs"], flags["eval_env_kwargs"] = (
        json.dumps({"path": str(FOLDER / f"prompts_{split}.jsonl")}) for split in ("train", "test"))  # fmt: skip
    with unittest.mock.patch.object(ppo_llm, "iteration_metrics", with_true_reward):
        ppo_llm.train(ppo_llm.Args(log_dir=str(FOLDER), run_name=name, resume="auto", device="cpu", **flags))
    keep = ("objective/kl", "objective/true_reward", "objective/reward_model", "objective/entropy", "time/iteration",
            "critic/explained_variance", "objective/response_tokens")  # fmt: skip
    rows = [{key: row.get(key) for key in keep} for row in common.read_lines(FOLDER / name / "metrics.jsonl")]
    completions = common.read_lines(FOLDER / name / "completions.jsonl")
    answers = [answer for answer in completions if answer["iteration"] in (0, 7, 15, 23)]
    print(f"{name}: see {FOLDER / name}, and preferences.py plot", file=sys.stderr)
    return {"pairs": count, "kl_coef": kl_coef, "seed": seed, "rows": rows, "answers": answers}


def reward_curves(run: dict) -> dict[str, list[float]]:
    """KL, true and learned reward of a run, as means of MEAN_OF iterations."""
    parts = [run["rows"][k : k + MEAN_OF] for k in range(0, len(run["rows"]), MEAN_OF)]
    return {name: [statistics.mean(row[f"objective/{name}"] for row in part) for part in parts]
            for name in ("kl", "true_reward", "reward_model")}  # fmt: skip


def explained_variance(run: dict) -> float:
    """The mean over the middle half of the iterations."""
    rows = run["rows"]
    middle = rows[len(rows) // 4 : len(rows) - len(rows) // 4]
    return statistics.mean(row["critic/explained_variance"] for row in middle)


def plot() -> None:
    runs = sorted(common.read_lines(RESULTS), key=lambda run: [run[name] for name in ("pairs", "kl_coef", "seed")])
    curves = collections.defaultdict(list)  # of the runs with 300 pairs, by the weight of the KL
    common.table(["pairs", "KL weight", "seed", "KL, nats", "learned reward: first, last",
                  "true reward: first, best, last", "explained variance, middle half"])  # fmt: skip
    for run in runs:
        kl, true, learned = reward_curves(run).values()
        if run["pairs"] == 300:
            curves[run["kl_coef"]].append((kl, learned, true))
        common.line([run["pairs"], run["kl_coef"], run["seed"], f"{kl[-1]:.1f}", f"{learned[0]:.2f}, {learned[-1]:.2f}",
                     f"{true[0]:.2f}, {max(true):.2f}, {true[-1]:.2f}", f"{explained_variance(run):.2f}"])  # fmt: skip
    draw(curves)
    print()
    common.table(["pairs", "KL weight", "iteration", "prompt", "answer", "learned", "true"])
    for run in runs:
        if run["seed"] == 1:
            for answer in run["answers"]:
                common.line([run["pairs"], run["kl_coef"], answer["iteration"], answer["prompt"],
                             answer["response"].replace("\n", " ").replace("|", "/"), f"{answer['reward']:.2f}",
                             f"{sentiment(answer['response']):.2f}"])  # fmt: skip


def draw(curves: dict[float, list]) -> None:
    title = "The learned and the true reward rise together, although the reward model is often wrong"
    figure, axes = common.new_picture(title, 3.6, 1, 2)
    names = "learned reward, standard deviations", "true reward, from -1 to 1"
    for axis, name, column in zip(axes, names, (1, 2)):
        for (weight, seeds), color in zip(curves.items(), (common.RED, common.INK, common.BLUE)):
            for seed in seeds[1:] and seeds:
                axis.plot(seed[0], seed[column], color=color, linewidth=0.7, alpha=0.6)
            kl, reward = (np.median([seed[i] for seed in seeds], axis=0) for i in (0, column))
            axis.plot(kl, reward, "o-", color=color, markersize=3.5)
            offset = (-6, 3) if weight > 0.01 else (0, -24)
            axis.annotate(f"KL x {weight:g}", (kl[-1], reward[-1]), offset, textcoords="offset points", color=color,
                          ha="right")  # fmt: skip
        axis.set(title=name, xlabel="KL to the reference, nats per response", xlim=(0, None))
    common.save_picture(figure, common.PICTURES / "preferences.png")


def is_on_topic(prompt: str, answer: str) -> bool:
    """Whether the answer has the last word of the prompt, in singular or plural."""
    word = re.findall(r"[a-z]+", prompt.lower())[-1]
    stem = word if len(word) < 5 else word[:-2]
    return re.search(rf"\b{stem}", answer.lower()) is not None


def look_at(folder: Path) -> dict:
    """What a model's answers to all prompts are like, one answer to each, with the same noise for every model."""
    questions = prompts("train") + prompts("test")
    pairs = answers(str(folder), questions, range(len(questions)), -1)
    beginnings = collections.Counter(" ".join(text.split()[:4]) for _, text in pairs)
    frequent, count = beginnings.most_common(1)[0]
    return {
        "prompts": len(questions),
        "on_topic": statistics.mean(is_on_topic(*pair) for pair in pairs),
        "true_reward": statistics.mean(sentiment(text) for _, text in pairs),
        "different": len(beginnings) / len(questions),
        "frequent": frequent,
        "share": count / len(questions),
    }


def look(folder: str) -> None:
    """A line for the checkpoint and for each trained model."""
    common.table(["model", "prompts", "mention the topic", "true reward", "different first four words",
                  "most frequent ones"])  # fmt: skip
    for model_folder in [Path(folder), *sorted(FOLDER.glob("*/model"))]:
        seen = look_at(model_folder)
        name = model_folder.parent.name if model_folder.name == "model" else "before"
        common.line([name, seen["prompts"], f"{seen['on_topic']:.0%}", f"{seen['true_reward']:.2f}",
                     f"{seen['different']:.0%}", f"{seen['frequent']!r}, {seen['share']:.0%}"])  # fmt: skip


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    what, *rest = sys.argv[1:]
    if what == "pairs":
        make_pairs(*rest)
    elif what == "reward-model":
        make_reward_model(rest[0], int(rest[1]))
    elif what == "ppo":
        common.add_line(RESULTS, ppo(rest[0], int(rest[1]), float(rest[2]), int(rest[3])))
    elif what == "look":
        look(*rest)
    else:
        plot()


if __name__ == "__main__":
    main()
