"""The deltaline server: recurrent layers behind gRPC, with their state; here its options, reasons of refusal, start."""

__version__ = "0.1.0"
