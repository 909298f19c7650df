"""What the recurrences share: tokens that decay a state per head and write into it, in prefill, decode and verify."""
