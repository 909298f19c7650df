"""A causal language model of transformers whose decoder layers are on deltaline servers.

    from deltaline_transformers import DeltalineForCausalLM

    with DeltalineForCausalLM.from_pretrained("/models/qwen", servers=["localhost:50051"]) as model:
        tokens = model.generate(input_ids, max_new_tokens=64)

Embeddings, final norm and head are here, as transformers has them for the checkpoint; the state of each row of a batch
is a sequence on every server. Knows transformers, torch and the client; neither the server nor the kernels.
"""

from deltaline_transformers._cache import DeltalineCache
from deltaline_transformers._model import DeltalineForCausalLM

__all__ = ["DeltalineCache", "DeltalineForCausalLM"]
