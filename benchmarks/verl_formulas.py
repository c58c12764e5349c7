"""verl's formulas beside ours, on random numbers: `python benchmarks/verl_formulas.py DIR`, DIR is a checkout of verl.

Nothing of verl is installed or imported: the functions are taken from its files, without their decorators.
"""

import ast
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import ppo_llm as ppo


def functions(path: Path, *names: str, **context) -> types.SimpleNamespace:
    """Those of a file, each without what stands around it."""
    nodes = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") in names]
    space = {"torch": torch} | context
    for node in nodes:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
        exec(compile(ast.Module([node], []), str(path), "exec"), space)
    return types.SimpleNamespace(**space)


def main(folder: Path):
    torch.manual_seed(0)
    masked = ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value")
    tools = functions(folder / "verl/utils/torch_functional.py", *masked)
    names = "compute_gae_advantage_return agg_loss compute_policy_loss compute_value_loss kl_penalty_forward".split()
    verl = functions(folder / "verl/trainer/ppo/core_algos.py", *names, verl_F=tools)
    mask = torch.rand(64, 200) < 0.6
    rewards, values, old, new, ref = (torch.randn(64, 200).clamp(-2, 2) * mask for _ in range(5))
    m = mask.float()

    gae, returns = ppo.compute_gae(rewards, values, mask, 0.97, 0.9)
    advantages = ppo.masked_whiten(gae, mask)
    theirs, their_returns = verl.compute_gae_advantage_return(rewards, values, m, 0.97, 0.9)
    loss, _ = ppo.policy_loss(new, old, advantages, mask, 0.2, 0.28, 3.0, int(mask.sum()))
    their_loss, *_ = verl.compute_policy_loss(old, new, advantages, m, None, 0.2, 0.28, 3.0)
    v_loss, _ = ppo.value_loss(new, values, returns, mask, 0.5, int(mask.sum()))
    their_v_loss, _ = verl.compute_value_loss(new, returns, values, m, 0.5)
    pairs = {
        "advantages, whitened": (advantages, theirs * m), "returns": (returns, their_returns * m),
        "policy loss": (loss, their_loss), "value loss": (v_loss, their_v_loss),
    }  # fmt: skip
    for kind in ("k1", "k2", "k3"):
        pairs[f"KL, {kind}"] = ppo.kl_estimate(old / 2, ref / 2, kind), verl.kl_penalty_forward(old / 2, ref / 2, kind)
    for name, (ours, other) in pairs.items():
        print(f"{name:22} {float((ours - other).abs().max()):.1e} apart, of {float(other.abs().max()):.3g} at most")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
