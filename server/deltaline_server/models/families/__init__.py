"""The families: of each model type what its configs say, how its tensors are called, which parts it has.

A family of known parts is an entry here and a test of it. Those that share parts are in one file.
"""
