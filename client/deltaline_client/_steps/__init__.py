"""Steps of sequences, from the numbers of a row to its outputs: written once, for threads and for asyncio."""
