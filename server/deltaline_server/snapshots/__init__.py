"""States of sequences that outlive them: captured, restored, and stored in tiers."""
