"""Stored states of prompts' beginnings: found by keys, weighed against computing, and given up when memory is short."""
