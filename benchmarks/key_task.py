"""An embedded task whose first token decides a reward that comes with the last.

    python ppo_llm.py --env-id benchmarks.key_task:Key-v0 --eval-env-kwargs '{"split": "test"}' --max-prompt-tokens 18 \
        --max-new-tokens 18
"""

import random
import zlib

import gymnasium as gym


class Key(gym.Env):
    """Prompt "abba...=": answer a key, 0 or 1, and the letters, as they are after a 0, and exchanged after a 1.

    The right key is 0 if the prompt begins with "aa" or "bb". Reward: the share of letters that are right for the key,
    if the answer has the right length and the right key, else a tenth of it. Demonstrations take any of the keys. A
    tenth of the prompts, by CRC, are held out.
    """

    def __init__(self, split: str = "train", letters: int = 16):
        self.is_test, self.letters = split == "test", letters

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed or 0)
        while True:
            self.text = "".join(rng.choice("ab") for _ in range(self.letters))
            if (zlib.crc32(self.text.encode()) % 10 == 0) == self.is_test:
                break
        return f"{self.text}=", {"demonstration": self.answer(rng.choice("01"))}

    def answer(self, key: str) -> str:
        return key + (self.text if key == "0" else self.text.translate(str.maketrans("ab", "ba")))

    def step(self, response):
        if response[:1] not in ("0", "1") or len(response) != 1 + self.letters:
            return "", 0.0, True, False, {"success": False}
        right = "0" if self.text[0] == self.text[1] else "1"
        share = sum(map(str.__eq__, response[1:], self.answer(response[0])[1:])) / self.letters
        reward = share * (1.0 if response[0] == right else 0.1)
        return "", reward, True, False, {"success": response == self.answer(right)}


gym.register("Key-v0", entry_point=Key)
