"""The deltaline server: recurrent layers of a language model behind gRPC, with the state they need."""

__version__ = "0.1.0"
