"""A stand-in for vLLM, for tests of forks/vllm.patch on machines without it: the part of its interface that is used.

A request is computed alone, a token per step, by the Transformer of the unpatched script or, for families that it does
not have, by the model of transformers. As in vLLM

- weights are random until they are loaded, and unknown names are refused
- on a CPU the head has a packed copy of its weights, which a tied head keeps when the embedding is loaded
- results of earlier texts are used until the prefix cache is reset, which fails while there are requests
- log-probs are raw, before the temperature, unless others are asked for
- a response ends at the eos of the model as well, unless that is ignored.
"""

import types

import torch
import transformers

import ppo_llm  # The tests import it before they replace it by the patched one.

from . import distributed, sampling_params
from .sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "distributed", "sampling_params"]
__version__ = "0.32.0"


class Model:
    """The engine's model. `lm_head.quant_method` packs the head."""

    def __init__(self, folder, dtype):
        try:
            self.config = ppo_llm.load_config(folder)
            self.transformer = ppo_llm.Transformer(self.config)
        except ppo_llm.UserError:  # another family
            self.config = transformers.AutoConfig.from_pretrained(folder)
            self.transformer = transformers.AutoModelForCausalLM.from_config(self.config).eval()
        self.transformer = self.transformer.to(dtype).requires_grad_(False)
        self.lm_head = self.transformer.get_submodule("lm_head")
        self.lm_head.quant_method = self
        self.process_weights_after_loading(self.lm_head)

    def modules(self):
        return self.transformer.modules()

    def process_weights_after_loading(self, head):
        self.packed = head.weight.clone()

    def load(self, weights):
        saved = self.transformer.state_dict()
        targets = dict(self.transformer.named_parameters())
        targets |= {name: x for name, x in self.transformer.named_buffers() if name in saved}
        for name, x in weights:
            assert type(x) is torch.Tensor or isinstance(x, torch.nn.Parameter), f"{name} is not whole"
            assert x.dtype == targets[name].dtype, name
            targets.pop(name).copy_(x)
            if name == "lm_head.weight":
                self.process_weights_after_loading(self.lm_head)
        assert not targets, f"not loaded: {list(targets)}"

    def logits(self, ids):
        ids = torch.tensor([ids])
        if not isinstance(self.transformer, ppo_llm.Transformer):
            return self.transformer(ids).logits[0, -1].float()
        x = self.transformer.hidden_states(ids, torch.arange(ids.shape[1]))[0, -1:]
        return ppo_llm.float32_product(x, self.packed.T)[0]


class LLM:
    engines = ()  # those that were made, the newest last

    def __init__(self, model, *, dtype, max_model_len, max_num_seqs, kv_cache_memory_bytes, load_format,
                 logprobs_mode="raw_logprobs", **flags):  # fmt: skip
        self.model = Model(model, getattr(torch, dtype))
        config = self.model.config
        cache = max_model_len * 2 * config.num_hidden_layers * config.hidden_size * 4
        if cache > kv_cache_memory_bytes:
            raise ValueError(f"To serve at least one request, {cache} bytes are needed")
        assert load_format == "dummy"
        self.eos = config.eos_token_id
        self.length, self.slots, self.mode, self.flags = max_model_len, max_num_seqs, logprobs_mode, flags
        self.llm_engine = self
        self.texts = {}  # {ids: logits of the next token}, the prefix cache
        self.running, self.asked, self.steps = {}, [], []  # steps: indices of the requests in each
        LLM.engines += (self,)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.model.load(kwargs["weights_iterator"])

    def apply_model(self, function):
        return [function(self.model)]

    def reset_prefix_cache(self):
        self.texts = self.texts if self.running else {}
        return not self.running

    def add_request(self, index, prompt, params):
        ids = tuple(prompt["prompt_token_ids"])
        assert prompt["type"] == "token" and len(ids) + params.max_tokens <= self.length and params.max_tokens > 0
        assert index not in self.running and params.output_kind == sampling_params.RequestOutputKind.FINAL_ONLY
        noise = torch.Generator().manual_seed(params.seed)
        self.running[index] = types.SimpleNamespace(ids=ids, params=params, noise=noise, token_ids=[], logprobs=[])
        self.asked.append((index, ids, params))

    def step(self):
        batch = list(self.running.items())[: self.slots]
        self.steps.append([index for index, _ in batch])
        return [self.output(index, self.running.pop(index)) for index, request in batch if self.ends(request)]

    def ends(self, request):
        """Generate the next token of a request. Whether it is the last one."""
        params, text = request.params, (*request.ids, *request.token_ids)
        if text not in self.texts:
            self.texts[text] = self.model.logits(text)
        logits = self.texts[text]
        scaled = logits / (params.temperature or 1.0)
        token = int(logits.argmax())
        if params.temperature:
            token = int(torch.multinomial(scaled.softmax(-1), 1, generator=request.noise))
        logprobs = (scaled if self.mode == "processed_logprobs" else logits).log_softmax(-1)
        request.token_ids.append(token)
        request.logprobs.append({token: types.SimpleNamespace(logprob=float(logprobs[token]))})
        eos = [] if params.ignore_eos else self.eos if isinstance(self.eos, list) else [self.eos]
        return token in params.stop_token_ids or token in eos or len(request.token_ids) == params.max_tokens

    def output(self, index, request):
        return types.SimpleNamespace(request_id=index, outputs=[request])
