"""The model: transformers' own without its layers, and servers in their place."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from deltaline_client import Client
from deltaline_transformers._cache import DeltalineCache
from deltaline_transformers._servers import Servers

# Options of from_pretrained that say where a checkpoint comes from.
SOURCE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class DeltalineForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model for `generate`, whose decoder layers are on servers: make it with from_pretrained.

    What generate does with a model goes: greedy search, sampling, beams (by forks), batches with padding on the left,
    going on from `past_key_values`, and assistance by prompt lookup or by another model, whose drafts are verified. It
    can't be trained, and can't assist another model. Leaving `with`, or `close`, closes its caches and
    disconnects from the servers.
    """

    def __init__(self, config: Any, ends: PreTrainedModel, servers: Servers) -> None:
        """ends: the model without layers, which embeds, and turns the layers' output into logits."""
        super().__init__(config)
        self.generation_config = ends.generation_config
        self.ends = ends
        self._servers = servers
        self._embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, servers: Iterable[str | Client], **options: Any
    ) -> Self:
        """Load embeddings, final norm and head of a checkpoint, and connect to the servers that hold its layers.

        servers: their addresses, or clients for those that need more than an address (TLS, a token); together they hold
        each layer once. options: as AutoModelForCausalLM.from_pretrained takes them. Raises ValueError for a checkpoint
        that lacks a tensor, and for servers that don't fit it; Unavailable for one that gives no answer.
        """
        name = pretrained_model_name_or_path
        config = AutoConfig.from_pretrained(name, **{key: options[key] for key in SOURCE if key in options})
        text = config.get_text_config(decoder=True)
        without_layers = copy.deepcopy(text)
        without_layers.num_hidden_layers = 0
        if "layers_block_type" in vars(text):  # it counts, not the number
            without_layers.layers_block_type = []
        if hasattr(text, "embedding_multiplier"):  # of what goes into the layers, which is not what the ends are given
            without_layers.embedding_multiplier = 1.0
        without_layers.tie_word_embeddings |= config.tie_word_embeddings  # which may stand beside text_config alone
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # its report would have a line for every tensor of the layers
        try:
            ends, loading = AutoModelForCausalLM.from_pretrained(
                name, config=without_layers, output_loading_info=True, **options
            )
        finally:
            logging.set_verbosity(verbosity)
        if missing := loading["missing_keys"]:
            raise ValueError(f"{name}: expected the tensors {', '.join(sorted(missing))}, which the checkpoint lacks")
        types = {config.model_type, text.model_type}
        return cls(text, ends, Servers(servers, types, text.hidden_size, text.num_hidden_layers))

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DeltalineCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute the logits of new tokens: what a causal language model of transformers does, without gradients.

        input_ids [batch, n], or inputs_embeds [batch, n, hidden]; attention_mask [batch, columns of the cache + n], 0
        for padding, which is not sent. Mutates past_key_values; without them opens sequences, which use_cache=False
        closes again. Raises ValueError and TypeError for arguments that don't fit; DeltalineError, behind which the
        cache is closed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either these or inputs_embeds")
        cache = self._cache(past_key_values)
        hidden = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        real = torch.ones(hidden.shape[:2], dtype=torch.bool)
        if attention_mask is not None:
            past, columns = cache.get_seq_length(), attention_mask.shape[1]
            if hidden.shape[1] == columns:
                hidden = hidden[:, past:]  # assistance begins with all tokens, those that the cache has too
            if attention_mask.shape != (expected := (len(hidden), past + hidden.shape[1])):
                raise ValueError(f"attention_mask: expected shape {expected}, got {tuple(attention_mask.shape)}")
            real = attention_mask[:, past:].bool().cpu()
        made = cache.step((hidden * self._embedding_multiplier).cpu(), real, logits_to_keep).to(hidden.device)
        if input_ids is not None:
            cache.end_rows(input_ids[:, -1])
        # Each token by itself: the ends know no positions.
        logits = self.ends(inputs_embeds=made.flatten(0, 1).unsqueeze(1), use_cache=False).logits
        output = CausalLMOutputWithPast(
            logits=logits.view(*made.shape[:2], -1), past_key_values=None if use_cache is False else cache
        )
        return output if return_dict else output.to_tuple()

    def get_input_embeddings(self) -> Any:
        """Return the module that makes hidden states of tokens."""
        return self.ends.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the module that makes logits of hidden states."""
        return self.ends.get_output_embeddings()

    def close(self) -> None:
        """Close the sequences of all caches, and disconnect from the servers, but for clients that were given."""
        self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cache(self, given: object) -> DeltalineCache:
        if given is None:
            return DeltalineCache(self._servers)
        if not isinstance(given, DeltalineCache) or given.servers is not self._servers:
            raise TypeError(f"past_key_values: expected a cache that this model made, got a {type(given).__name__}")
        return given

    # Two methods that are private to transformers, for want of a public place: where generate makes its cache, knowing
    # what ends a row, and where it chooses what makes drafts.

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: object
    ) -> None:
        if generation_config.use_cache is False:
            return
        mask = model_kwargs["attention_mask"]
        if not mask[:, -1].all():
            raise ValueError("attention_mask: expected padding on the left, got a row that ends with padding")
        cache = model_kwargs["past_key_values"] = self._cache(model_kwargs.get("past_key_values"))
        ends = generation_config.eos_token_id
        has_ends = ends is not None and generation_config.num_beams == 1  # a beam that ends is put aside
        end_tokens = set(torch.as_tensor(ends).flatten().tolist()) if has_ends else set[int]()
        cache.begin(end_tokens, mask.shape[1])

    def _get_candidate_generator(self, *args: Any, **options: Any) -> CandidateGenerator:
        generator = super()._get_candidate_generator(*args, **options)
        return BoundedCandidates(generator, self._servers.max_draft_tokens - 1)


class BoundedCandidates(CandidateGenerator):
    """The first candidates of another generator: as many as the servers verify in one step."""

    def __init__(self, generator: CandidateGenerator, most: int) -> None:
        self._generator, self._most = generator, most
        self.requires_model_outputs = generator.requires_model_outputs

    def get_candidates(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return tokens [1, n + candidates], and logits of the candidates where the generator has them."""
        candidates, logits = self._generator.get_candidates(input_ids, **options)
        return candidates[:, : input_ids.shape[1] + self._most], logits if logits is None else logits[:, : self._most]

    def update_candidate_strategy(self, *outcome: Any) -> None:
        """Tell the generator how many of its candidates were right."""
        self._generator.update_candidate_strategy(*outcome)
