"""The figures that are current, out of the records under bench/results: a page, the README's table, and a picture."""
