"""The service judged as a whole: server, echo and clients are processes of one host.

`python bench/service.py` runs it. Each part measures, and makes its figures in `judge`, which measures nothing.
"""
