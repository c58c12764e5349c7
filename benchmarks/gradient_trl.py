"""The gradients of the first update, in TRL's PPOTrainer (trl.experimental.ppo) and here, from the same samples.

    python benchmarks/smollm2.py DIR
    python benchmarks/gradient_trl.py DIR

TRL samples 32 answers to sums of one digit; both sides take them as one minibatch. If an answer ends early, TRL puts
its reward one token behind the end, from where GAE takes lambda once more: "as TRL" is ours with such rewards times
lambda. TRL trains the value there, too, which is left as it is.
"""

import contextlib
import io
import sys
import tempfile
import unittest.mock
import warnings

import common
import learning_real
import torch
from common import ppo_llm
from torch.optim.optimizer import register_optimizer_step_pre_hook

FLAGS = learning_real.TASKS["sums, as TRL"] | dict(train_batch_size=32, ppo_epochs=1)


class Done(Exception):
    """The gradients are there."""


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All of `model`, in the order of the names."""
    named = sorted(model.named_parameters())
    return torch.cat([p.grad.flatten().double() if p.grad is not None else p.flatten().double() * 0 for _, p in named])


def of_trl(folder: str) -> tuple[dict[str, torch.Tensor], list[list[int]], list[float]]:
    """Gradients of actor and critic, the rows of tokens without padding, their rewards."""
    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(io.StringIO()):
        trainer = learning_real.trl_trainer(folder, FLAGS, 1, runs)
        pad, scored, found = trainer.processing_class.pad_token_id, [], {}
        backbone = trainer.reward_model.backbone

        def record(input_ids, **kwargs):
            output = backbone(input_ids, **kwargs)
            scored.append((input_ids.tolist(), output.hidden_states[0][:, 0, 0].tolist()))
            return output

        def before_step(*args):
            found.update(actor=gradients(trainer.policy_model), critic=gradients(trainer.value_model))
            raise Done

        hook = register_optimizer_step_pre_hook(before_step)
        with unittest.mock.patch.object(trainer.reward_model, "backbone", record), contextlib.suppress(Done):
            trainer.train()
        hook.remove()
    rows, rewards = scored[0]
    return found, [[token for token in row if token != pad] for row in rows], rewards


def as_episodes(folder: str, rows: list[list[int]], rewards: list[float]) -> list[ppo_llm.Episode]:
    tokenizer, episodes = ppo_llm.HFTokenizer(folder), []
    header = tokenizer.encode("<|im_start|>assistant\n")
    for row, reward in zip(rows, rewards):
        starts = [i for i in range(len(row)) if row[i : i + len(header)] == header]
        response = starts[0] + len(header)
        episode = ppo_llm.Episode(0, conversation=[("user", ""), ("assistant", "")])
        episode.add(row[:response])
        episode.add(row[response:], [0.0] * (len(row) - response))
        episode.rewards[-1] = reward
        episode.stop = "eos" if row[-1] in tokenizer.stop_ids else "length"
        episodes.append(episode)
    return episodes


def of_ours(folder: str, episodes: list[ppo_llm.Episode]) -> dict[str, torch.Tensor]:
    found = {}

    def optimizer_step(model, *args):  # the critic's comes first
        if found:
            found["actor"] = gradients(model)
            raise Done
        found["critic"] = gradients(model)
        model.zero_grad()
        return {}

    patch = unittest.mock.patch.object
    with (
        tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Done),
        patch(ppo_llm, "optimizer_step", optimizer_step), patch(ppo_llm, "evaluate", return_value={}),
        patch(ppo_llm, "play", return_value=episodes), patch(ppo_llm.Run, "close"),
    ):  # fmt: skip
        ppo_llm.train(ppo_llm.Args(model=folder, device="cpu", log_dir=runs, save_every=0, eval_episodes=1, **FLAGS))
    return found


def main() -> None:
    folder = sys.argv[1]
    trl, rows, rewards = of_trl(folder)
    episodes, as_trl = (as_episodes(folder, rows, rewards) for _ in range(2))
    ended = [episode for episode in as_trl if sum(episode.mask) < FLAGS["max_new_tokens"]]
    for episode in ended:
        episode.rewards[-1] *= FLAGS["gae_lambda"]
    print(f"{len(rows)} samples, {sum(reward > 0 for reward in rewards)} right, {len(ended)} ended early\n")
    common.table(["gradient of", "side", "cosine with TRL's", "norm", "norm of TRL's"])
    for side, samples in ("ours", episodes), ("ours, as TRL", as_trl):
        for model, gradient in sorted(of_ours(folder, samples).items()):
            other = trl[model] / (0.1 if model == "critic" else 1.0)  # TRL's weight of the value loss
            cosine = torch.nn.functional.cosine_similarity(gradient, other, dim=0)
            common.line([model, side, f"{cosine:.6f}", f"{gradient.norm():.4f}", f"{other.norm():.4f}"])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
