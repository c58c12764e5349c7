"""The embedded task with responses of unequal length: strings of 2 to 7 digits.

    export PYTHONPATH=benchmarks
    bash benchmarks/default_task.sh ppo_llm_continuous_batching.py --env-id sort_some:SortSome-v0 \
        --eval-env-kwargs '{"split": "test"}' --rollout-slots 64
"""

import gymnasium as gym


class SortSome(gym.Env):
    def __init__(self, split="train"):
        make = lambda digits: gym.make("SortDigits-v0", disable_env_checker=True, split=split, digits=digits)
        self.envs = [make(digits).unwrapped for digits in range(2, 8)]

    def reset(self, *, seed=None, options=None):
        self.env = self.envs[(seed or 0) % 6]
        return self.env.reset(seed=seed)

    def step(self, response):
        return self.env.step(response)


gym.register("SortSome-v0", entry_point=SortSome)
