"""Steps of sequences, from the numbers of a row to its outputs: written once, for threads and for asyncio.

Generators here (flows) yield what is to be sent and know no channel; everything else sends nothing.
"""
