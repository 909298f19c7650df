"""The queue of steps, and what runs next: which steps are admitted, which rows a batch has, when it is formed."""
