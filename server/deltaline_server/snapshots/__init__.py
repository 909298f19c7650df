"""Stored states: captured in the order of a sequence's steps and begun from; in which bytes, and where they lie."""
