"""StateService: what is asked of states from outside, by snapshots and on their way between servers."""
