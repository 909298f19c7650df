"""Many adapters of one small model: their files, and what each computes when it is the only one there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules, write_adapter
from rigs.layer_calls import streamed
from rigs.programs import Alone, Program
from safetensors.torch import save

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline.v1 import layer_service_pb2 as layer_pb
from deltaline.v1.adapter_service_pb2_grpc import AdapterServiceStub
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline_client import AsyncClient, AsyncSequence
from deltaline_client._steps.sequences import begin
from deltaline_client._transport.flow import Server
from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.checkpoints.tensor_file import MemoryBytes, TensorFile
from deltaline_server.computing import model_options
from deltaline_server.config import Config
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.model import AdapterOptions, load_model

MAX_RANK = 4
PIECE = 1 << 16


class Fleet:
    """Adapters 0 .. count - 1 with ranks 1 .. MAX_RANK, all random, and a model that has a slot for each of them.

    Attributes: hashes, and num_bytes of host memory, by adapter; alone, a model without a server.
    """

    def __init__(self, config: Config, count: int) -> None:
        """config: the server's."""
        assert config.random_init is not None
        shape = ModelConfig.from_mapping(json.loads(Path(config.random_init).read_text()))
        torch.manual_seed(1)
        base = base_weights(shape)
        self._files: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
        for i in range(count):
            rank = 1 + i % MAX_RANK
            tensors = adapter_tensors(base, modules(shape), rank=rank)
            tensors = {name: 0.5 * tensor * tensor.shape[-1] ** -0.5 for name, tensor in tensors.items()}
            self._files.append((adapter_config(r=rank, lora_alpha=2 * rank), tensors))
        options = model_options(config)
        made = AdapterOptions(count, MAX_RANK)
        model = load_model(type(options)(**vars(options) | {"adapters": made}))
        assert model.adapters is not None
        self.hashes, self.num_bytes = [], []
        for i, (adapter, tensors) in enumerate(self._files):
            file = TensorFile(MemoryBytes(bytearray(save(tensors)), "adapter_model.safetensors"))
            plan = AdapterPlan(AdapterConfig(adapter), file, model.layout)
            loaded = plan.load(None, lambda size: torch.empty(size, dtype=torch.uint8))
            model.adapters.write(i, loaded)
            self.hashes.append(loaded.content_hash)
            self.num_bytes.append(loaded.num_bytes)
        assert len(set(self.hashes)) == count
        self._slots = {content_hash: i for i, content_hash in enumerate(self.hashes)} | {b"": -1}
        self.alone = Alone(model, config.max_draft_tokens)

    def write(self, root: Path, name: str, adapter: int) -> None:
        """Write an adapter as a directory of the server's folder."""
        write_adapter(root / name, *self._files[adapter])

    def upload(self, name: str, adapter: int) -> list[pb.LoadAdapterRequest]:
        """The messages that load an adapter."""
        config, tensors = self._files[adapter]
        content = save(tensors)
        upload = pb.AdapterUpload(config=json.dumps(config).encode(), tensors_bytes=len(content))
        chunks = (content[i : i + PIECE] for i in range(0, len(content), PIECE))
        return [pb.LoadAdapterRequest(name=name, upload=upload), *(pb.LoadAdapterRequest(chunk=c) for c in chunks)]

    def expected(self, program: Program, content_hash: bytes) -> list[np.ndarray[Any, Any]]:
        """Outputs by step of a program under the adapter of this hash, empty for none."""
        return self.alone.run(program, self._slots[content_hash])


class Tenant:
    """A client with stubs of the services, until the client's own calls are asked."""

    def __init__(self, client: AsyncClient, channel: Any) -> None:
        self.client = client
        self.adapters: Any = AdapterServiceStub(channel)
        self.layers: Any = LayerServiceStub(channel)

    async def load(self, messages: list[pb.LoadAdapterRequest] | str, **options: Any) -> pb.LoadAdapterResponse:
        """Load from messages, or by name from the server's folder."""
        if isinstance(messages, str):
            messages = [pb.LoadAdapterRequest(name=messages, **options)]
        response: pb.LoadAdapterResponse = await streamed(self.adapters.LoadAdapter, messages, timeout=60)
        return response

    async def unload(self, name: str, drain: bool = False) -> int:
        response = await self.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=name, drain=drain), timeout=60)
        return int(response.sequences)

    async def listed(self) -> pb.ListAdaptersResponse:
        response: pb.ListAdaptersResponse = await self.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=60)
        return response

    async def open(self, adapter: str, count: int = 1, **fields: Any) -> tuple[list[AsyncSequence], bytes]:
        """Sequences with an adapter, and its content hash."""
        request = layer_pb.OpenSequencesRequest(count=count, adapter=adapter, **fields)
        response = await self.layers.OpenSequences(request, timeout=60)
        opened = begin(
            self.client, AsyncSequence, Server(response.server_epoch, response.server), response.sequence, 0, None, b""
        )
        return opened, bytes(response.adapter_hash)
