"""What changes the scores of an attention, or says which keys a query sees."""
