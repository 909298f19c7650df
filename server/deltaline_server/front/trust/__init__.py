"""Trust: who a call is from, and what they may do."""
