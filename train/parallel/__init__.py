"""What makes a model parallel, from outside."""
