"""What the CPU paths of several families share."""
