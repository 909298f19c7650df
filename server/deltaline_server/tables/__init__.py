"""Who has what, by slot: handles, leases, progress, kept replies, lines, pages, adapters; and who loses it."""
